"""A network and an attacker: all that a bound is asked about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import keras
import tensorflow as tf

from keras_rub.bounds import rounding
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.linear import LinearRelaxation
from keras_rub.bounds.lines import Lines
from keras_rub.bounds.lowering import lower
from keras_rub.bounds.majorant import Clean, Relaxation, clean_pass
from keras_rub.bounds.program import Bounded, Program
from keras_rub.bounds.vertex_expansion import VertexExpansion
from keras_rub.bounds.vertices import VertexBound
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import PerturbationSet


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A lowered network and the perturbations that it must withstand.

    Its methods are plain TensorFlow code. They take x [batch, *features],
    labels [batch] and rho [batch] (or one radius for all), and return margins
    by competitor.

    Args:
        program: the network.
        inputs: how the user's inputs become x, and the attacker on it.
        memory_budget: int. Bytes that one chunk of vertices may take.
    """

    program: Program
    inputs: SingleInput
    memory_budget: int = 2**26

    @classmethod
    def of(
        cls,
        base: keras.Model,
        perturbations: PerturbationSet,
        memory_budget: int = 2**26,
        bound: str = "a certificate",
    ) -> Problem:
        """Lowers a built classifier; `bound` says for what, in errors."""
        single = SingleInput.of(base, perturbations)
        program = lower(single.network, bound)
        single.perturbations.check_shape(program.input_shape)
        return cls(program, single, memory_budget)

    @property
    def perturbations(self) -> PerturbationSet:
        """The attacker."""
        return self.inputs.perturbations

    @functools.cached_property
    def expansion(self) -> VertexExpansion:
        """The vertices of the L1 ball."""
        expansion = VertexExpansion(
            mask=self.perturbations.mask, weights=self.perturbations.weights
        )
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
            # Not all of the rows are alive at once.
            memory_budget=4 * self.memory_budget,
        )
        return {
            operation.output: relaxation.lines[operation.output]
            for operation in self.program.operations
            if isinstance(operation, Bounded)
        }

    def linear_margins(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        kind: str,
        training: bool = False,
    ) -> tf.Tensor:
        """Margins of a linear relaxation; see `LinearRelaxation`."""
        relaxation = LinearRelaxation(
            self.program, x, rho, self.perturbations, kind, training
        )
        return relaxation.margins(self.competitors(labels))
