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
from keras_rub.bounds.lowering import lower
from keras_rub.bounds.majorant import Relaxation
from keras_rub.bounds.program import Program
from keras_rub.bounds.vertex_expansion import VertexExpansion
from keras_rub.bounds.vertices import VertexBound
from keras_rub.perturbations import PerturbationSet


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A lowered network and the perturbations that it must withstand.

    Its methods are plain TensorFlow code. They take x [batch, *features],
    labels [batch] and rho [batch] (or one radius for all), and return margins
    by competitor.

    Args:
        program: the network.
        perturbations: the attacker.
        memory_budget: int. Bytes that one chunk of vertices may take.
    """

    program: Program
    perturbations: PerturbationSet
    memory_budget: int = 2**26

    @classmethod
    def of(
        cls,
        base: keras.Model,
        perturbations: PerturbationSet,
        memory_budget: int = 2**26,
    ) -> Problem:
        """Lowers a built Sequential or Functional classifier."""
        program = lower(base)
        perturbations.check_shape(program.input_shape)
        return cls(program, perturbations, memory_budget)

    @functools.cached_property
    def expansion(self) -> VertexExpansion:
        """The vertices of the L1 ball."""
        expansion = VertexExpansion(
            mask=self.perturbations.mask, weights=self.perturbations.weights
        )
        expansion.build((None, *self.program.input_shape))
        return expansion

    def competitors(self, labels: tf.Tensor) -> Competitors:
        """The classes that compete with these labels."""
        return Competitors(labels, self.program.num_classes)

    def relaxation(self, x: tf.Tensor, labels: tf.Tensor) -> Relaxation:
        """The network, made ready for a batch."""
        return Relaxation(self.program, x, self.competitors(labels))

    def logits(self, x: tf.Tensor) -> tf.Tensor:
        """The network's outputs [batch, K], in the type of `x`."""
        labels = tf.zeros(tf.shape(x)[:1], tf.int32)
        return self.relaxation(x, labels).values[self.program.output]

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
    ) -> VertexBound:
        """The majorant at the vertices; see `VertexBound`."""
        return VertexBound(
            self.program,
            self.expansion,
            x,
            labels,
            rho,
            room=self.perturbations.room(x),
            memory_budget=self.memory_budget,
            choices=choices,
        )

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
