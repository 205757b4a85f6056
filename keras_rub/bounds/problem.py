"""A network and an attacker: all that a bound is asked about."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_rub.bounds import rounding
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.intervals import Ball, IntervalBound
from keras_rub.bounds.linear import LinearRelaxation
from keras_rub.bounds.lines import Lines
from keras_rub.bounds.lowering import lower
from keras_rub.bounds.majorant import Clean, Relaxation, clean_pass
from keras_rub.bounds.program import Bounded, Convex, Max, Program
from keras_rub.bounds.vertex_expansion import VertexExpansion
from keras_rub.bounds.vertices import VertexBound
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import PerturbationSet

# Values with more entries than this are not substituted where all rows are
# alive at once, as in a training step.
_WIDEST_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A lowered network and the perturbations that it must withstand.

    Its methods are plain TensorFlow code. They take x [batch, *features],
    labels [batch] and rho [batch] (or one radius for all), and return margins
    by competitor.

    Args:
        program: the network.
        inputs: how the user's inputs become x, and the attacker on it.
        memory_budget: int. Bytes that one chunk of vertices, or of rows that
            are substituted backward, may take.
        widest: int, or `None`. In a linear relaxation, values with more
            entries than this get interval ranges.
    """

    program: Program
    inputs: SingleInput
    memory_budget: int = 2**26
    widest: int | None = None

    @classmethod
    def of(
        cls,
        base: keras.Model,
        perturbations: PerturbationSet,
        memory_budget: int = 2**26,
        bound: str = "a certificate",
        widest: int | None = None,
    ) -> Problem:
        """Lowers a built classifier; `bound` says for what, in errors."""
        single = SingleInput.of(base, perturbations)
        program = lower(single.network, bound)
        single.perturbations.check_shape(program.input_shape)
        return cls(program, single, memory_budget, widest)

    @property
    def perturbations(self) -> PerturbationSet:
        """The attacker."""
        return self.inputs.perturbations

    @functools.cached_property
    def expansion(self) -> VertexExpansion:
        """The vertices of the L1 ball, without switches."""
        free = self.perturbations.numeric(self.program.input_shape)
        expansion = VertexExpansion(mask=free.mask, weights=free.weights)
        expansion.build((None, *self.program.input_shape))
        return expansion

    def clean(self, x: tf.Tensor) -> Clean:
        """The clean pass of a batch."""
        return clean_pass(self.program, x)

    def competitors(
        self, labels: tf.Tensor, drawn: tf.Tensor | None = None
    ) -> Competitors:
        """The classes that compete with these labels; see `Competitors`."""
        return Competitors(labels, self.program.num_classes, drawn)

    def relaxation(self, x: tf.Tensor, labels: tf.Tensor) -> Relaxation:
        """The network, made ready for a batch."""
        return Relaxation(self.program, self.clean(x), self.competitors(labels))

    def logits(self, x: tf.Tensor) -> tf.Tensor:
        """The network's outputs [batch, K], in the type of `x`."""
        return self.clean(x).values[self.program.output]

    def allowance(
        self, x: tf.Tensor, labels: tf.Tensor, rho: tf.Tensor
    ) -> tf.Tensor:
        """What a margin must be below 0 by, to be called negative."""
        return rounding.allowance(
            self.relaxation(x, labels), rho, self.perturbations
        )

    def vertex_bound(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        choices: Mapping[int, tf.Tensor] | None = None,
        *,
        clean: Clean | None = None,
        drawn: tf.Tensor | None = None,
    ) -> VertexBound:
        """The majorant at the vertices; see `VertexBound`.

        Args:
            x: tensor [batch, *features].
            labels: int tensor [batch].
            rho: tensor [] or [batch].
            choices: other lines below the activations; see `Relaxation`.
            clean: the clean pass of `x`, if it is known already.
            drawn: int tensor [batch, C]. The competitors that count. Defaults
                to `None`, all of them.
        """
        return VertexBound(
            self.program,
            self.expansion,
            self.clean(x) if clean is None else clean,
            self.competitors(labels, drawn),
            rho,
            room=self.perturbations.room(x),
            switches=self.perturbations.switches(x, rho),
            memory_budget=self.memory_budget,
            choices=choices,
            lines=self.lines(x, rho),
        )

    def lines(self, x: tf.Tensor, rho: tf.Tensor) -> dict[int, Lines]:
        """Lines that hold the `Bounded` operations over the whole set.

        Their ranges come from a linear relaxation, as far as the memory
        budget allows, and are intervals beyond it.
        """
        count = self.program.last_bounded()
        if not count:
            return {}
        relaxation = LinearRelaxation(
            self.program,
            x,
            rho,
            self.perturbations,
            count=count,
            widest=_WIDEST_AT_ONCE,
            # Not all of the rows are alive at once.
            memory_budget=4 * self.memory_budget,
        )
        return {
            operation.output: relaxation.lines[operation.output]
            for operation in self.program.operations
            if isinstance(operation, Bounded)
        }

    def intervals(self, x: tf.Tensor, rho: tf.Tensor) -> IntervalBound:
        """Ranges of all values; see `IntervalBound`."""
        return IntervalBound(self.program, Ball(x, rho, self.perturbations))

    def interval_margins(
        self, x: tf.Tensor, labels: tf.Tensor, rho: tf.Tensor
    ) -> tf.Tensor:
        """Margins by interval arithmetic alone."""
        return self.intervals(x, rho).margins(self.competitors(labels))

    def linear(
        self,
        x: tf.Tensor,
        rho: tf.Tensor,
        kind: str,
        *,
        ranges: str = "linear",
        training: bool = False,
    ) -> LinearRelaxation:
        """A linear relaxation of a batch.

        In training everything is on the tape at once, so wide values get
        interval ranges.
        """
        settings: dict[str, Any] = {"memory_budget": self.memory_budget}
        settings.update(widest=self.widest, chunked=True)
        if training:
            settings = {"widest": _WIDEST_AT_ONCE}
        return LinearRelaxation(
            self.program,
            x,
            rho,
            self.perturbations,
            kind,
            training,
            ranges=ranges,
            **settings,
        )

    def linear_margins(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        kind: str,
        *,
        ranges: str = "linear",
        training: bool = False,
    ) -> tf.Tensor:
        """Margins of a linear relaxation; see `LinearRelaxation`.

        With interval ranges, never above those of interval arithmetic.
        """
        relaxation = self.linear(x, rho, kind, ranges=ranges, training=training)
        margins = relaxation.margins(self.competitors(labels))
        if ranges == "linear":
            return margins
        return tf.minimum(margins, self.interval_margins(x, labels, rho))

    @functools.cached_property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of all values, without the batch."""
        with tf.init_scope():
            values = self.clean(tf.zeros([1, *self.program.input_shape])).values
        return {index: tuple(v.shape[1:]) for index, v in values.items()}

    def interval_layers(
        self, ranges: str = "linear", uses_vertices: bool = False
    ) -> tuple[str, ...]:
        """The layers whose inputs get their ranges from intervals.

        Args:
            ranges: as of `LinearRelaxation`.
            uses_vertices: bool. Whether only the lines of `Bounded`
                operations count, which are found as `lines` does.
        """
        affine = {0, *(op.output for op in self.program.prefix())}
        found = []
        for operation in self.program.operations:
            kinds = Bounded if uses_vertices else (Bounded, Convex, Max)
            if not isinstance(operation, kinds):
                continue
            (source,) = operation.inputs
            width = math.prod(self.shapes[source])
            wide = self.widest is not None and width > self.widest
            if uses_vertices:
                total = sum(
                    math.prod(self.shapes[i]) for i in range(operation.output)
                )
                wide = width > _WIDEST_AT_ONCE or (
                    width * total * 4 > 4 * self.memory_budget
                )
            if source not in affine and (ranges == "interval" or wide):
                found.append(operation.layer)
        return tuple(dict.fromkeys(found))
