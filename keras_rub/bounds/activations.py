"""Activations that are convex and non-decreasing, and lines below them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ConvexActivation:
    """A convex non-decreasing function f with f' in [lowest_slope, 1 or more].

    A bound needs a line that is nowhere above f. The lines are numbered by
    one parameter: its slope where f is two rays from the origin (the ReLU
    family: every slope between those of the rays will do), else the point
    where it touches f.

    Args:
        function: f, elementwise on a tensor.
        derivative: f' (one of the one-sided ones at a kink).
        rays: pair of slopes left and right of 0 where f is two rays from the
            origin, else `None`.
    """

    function: Callable[[tf.Tensor], tf.Tensor]
    derivative: Callable[[tf.Tensor], tf.Tensor]
    rays: tuple[float, float] | None = None

    @property
    def is_identity(self) -> bool:
        return self.rays == (1.0, 1.0)

    def tangent_parameter(self, z: tf.Tensor) -> tf.Tensor:
        """The parameter of the line that touches f at `z`."""
        return z if self.rays is None else self.derivative(z)

    def clip_parameter(self, parameter: tf.Tensor) -> tf.Tensor:
        """The nearest parameter whose line is below f."""
        if self.rays is None:
            return parameter
        return tf.clip_by_value(parameter, *self.rays)

    def line(self, parameter: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Slope and height at 0 (`None` for 0) of the line below f."""
        if self.rays is not None:
            return parameter, None
        slope = self.derivative(parameter)
        return slope, self.function(parameter) - slope * parameter


def linear() -> ConvexActivation:
    """The identity."""
    return ConvexActivation(tf.identity, tf.ones_like, (1.0, 1.0))


def leaky_relu(negative_slope: float) -> ConvexActivation | None:
    """max(z, negative_slope * z); convex and growing for slopes in [0, 1]."""
    if not 0.0 <= negative_slope <= 1.0:
        return None
    low = float(negative_slope)
    if low == 0.0:
        function = tf.nn.relu
    else:

        def function(z):
            return tf.maximum(z, low * z)

    def derivative(z):
        return tf.where(z > 0, tf.ones_like(z), low * tf.ones_like(z))

    return ConvexActivation(function, derivative, (low, 1.0))


def elu(alpha: float) -> ConvexActivation | None:
    """Z above 0, alpha (exp z - 1) below; convex for alpha in [0, 1]."""
    if not 0.0 <= alpha <= 1.0:
        return None

    def below(z):
        # The branch that is not taken must not overflow: its gradient would
        # be 0 * inf.
        return tf.minimum(z, tf.zeros_like(z))

    def function(z):
        return tf.where(z > 0, z, alpha * tf.math.expm1(below(z)))

    def derivative(z):
        return tf.where(z > 0, tf.ones_like(z), alpha * tf.exp(below(z)))

    return ConvexActivation(function, derivative)


def softplus() -> ConvexActivation:
    """log(1 + exp z)."""
    return ConvexActivation(tf.math.softplus, tf.math.sigmoid)


def from_keras(activation: Callable) -> ConvexActivation | None:
    """Returns the convex form of a Keras activation, or `None`.

    Args:
        activation: function from `keras.activations`, or a layer that is used
            as an activation.
    """
    layer_forms = {
        keras.layers.ReLU: lambda a: (
            leaky_relu(float(a.negative_slope))
            if a.max_value is None and not a.threshold
            else None
        ),
        keras.layers.LeakyReLU: lambda a: leaky_relu(float(a.negative_slope)),
        keras.layers.ELU: lambda a: elu(float(a.alpha)),
        keras.layers.Activation: lambda a: from_keras(a.activation),
    }
    for layer_type, form in layer_forms.items():
        if isinstance(activation, layer_type):
            return form(activation)
    function_forms = {
        keras.activations.linear: linear,
        keras.activations.relu: lambda: leaky_relu(0.0),
        keras.activations.leaky_relu: lambda: leaky_relu(0.2),
        keras.activations.elu: lambda: elu(1.0),
        keras.activations.softplus: softplus,
        keras.ops.relu: lambda: leaky_relu(0.0),
        tf.nn.relu: lambda: leaky_relu(0.0),
        tf.nn.softplus: softplus,
        tf.nn.elu: lambda: elu(1.0),
    }
    try:
        return function_forms[activation]()
    except (KeyError, TypeError):
        return None
