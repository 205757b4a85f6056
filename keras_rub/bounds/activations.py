"""The activations that a bound knows, and how it holds them.

One that is convex and non-decreasing keeps its own shape from above and is
held by a line from below; any other one is held between two lines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_rub.bounds.lines import BoundedActivation
from keras_rub.keras_internals import operation_of


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
        size: function of a tensor, or `None`. The largest magnitude of all
            terms of f and of its lines, where that of its input is known.
            Defaults to `None`, that of a function with slopes of at most 1.
    """

    function: Callable[[tf.Tensor], tf.Tensor]
    derivative: Callable[[tf.Tensor], tf.Tensor]
    rays: tuple[float, float] | None = None
    size: Callable[[tf.Tensor], tf.Tensor] | None = None

    @property
    def is_identity(self) -> bool:
        return self.rays == (1.0, 1.0)

    def magnitude(self, size: tf.Tensor) -> tf.Tensor:
        """The largest magnitude of f where that of its input is `size`."""
        if self.size is not None:
            return self.size(size)
        return size + tf.abs(self.function(tf.zeros_like(size[:1])))

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


def leaky_relu(negative_slope: float) -> Activation:
    """max(z, negative_slope * z) for slopes up to 1, else the minimum."""
    low = float(negative_slope)
    if not 0.0 <= low <= 1.0:
        return piecewise_linear(
            lambda z: tf.nn.relu(z) - low * tf.nn.relu(-z),
            (0.0,),
            steepest=max(1.0, abs(low)),
            increasing=low >= 0.0,
        )
    if low == 0.0:
        function = tf.nn.relu
    else:

        def function(z):
            return tf.maximum(z, low * z)

    def derivative(z):
        return tf.where(z > 0, tf.ones_like(z), low * tf.ones_like(z))

    return ConvexActivation(function, derivative, (low, 1.0))


def relu(
    negative_slope: float = 0.0,
    max_value: float | None = None,
    threshold: float = 0.0,
) -> Activation:
    """Keras's ReLU with all its arguments."""
    if max_value is None and not threshold:
        return leaky_relu(negative_slope)
    low, start = float(negative_slope), float(threshold)
    limit = None if max_value is None else float(max_value)
    bends = {0.0, start, *([] if limit is None else [limit])}
    return piecewise_linear(
        lambda z: keras.activations.relu(z, low, limit, start),
        sorted(bends),
        steepest=max(1.0, abs(low)),
        increasing=low >= 0.0 and start >= 0.0,
        continuous=not start,
    )


def piecewise_linear(
    function: Callable[[tf.Tensor], tf.Tensor], bends, **settings: Any
) -> BoundedActivation:
    """A function of linear pieces between `bends`."""
    shapes = ("linear",) * (len(bends) + 1)
    return BoundedActivation(function, shapes, tuple(bends), **settings)


def _below(z):
    # The branch that is not taken must not overflow: its gradient would be
    # 0 * inf.
    return tf.minimum(z, tf.zeros_like(z))


def elu(alpha: float, scale: float = 1.0) -> Activation:
    """Scale times: z above 0, alpha (exp z - 1) below."""

    def function(z):
        below = alpha * tf.math.expm1(_below(z))
        return scale * tf.where(z > 0, z, below)

    def derivative(z):
        below = alpha * tf.exp(_below(z))
        return scale * tf.where(z > 0, tf.ones_like(z), below)

    if scale == 1.0 and 0.0 <= alpha <= 1.0:
        return ConvexActivation(function, derivative)
    return BoundedActivation(
        function,
        ("convex" if alpha > 0 else "concave", "linear"),
        (0.0,),
        derivative,
        steepest=scale * max(1.0, abs(alpha)),
        increasing=alpha >= 0.0,
    )


def selu() -> Activation:
    """Keras's scaled ELU."""
    return elu(1.6732632423543772, 1.0507009873554805)


def celu(alpha: float) -> Activation | None:
    """Z above 0, alpha (exp(z / alpha) - 1) below; for alpha above 0."""
    if alpha <= 0.0:
        return None
    return ConvexActivation(
        lambda z: tf.where(z > 0, z, alpha * tf.math.expm1(_below(z) / alpha)),
        lambda z: tf.exp(_below(z) / alpha),
    )


def softplus() -> ConvexActivation:
    """log(1 + exp z)."""
    return ConvexActivation(tf.math.softplus, tf.math.sigmoid)


def squareplus(b: float) -> ConvexActivation:
    """(z + sqrt(z^2 + b)) / 2."""

    def function(z):
        root = tf.sqrt(tf.square(z) + b)
        # Without the difference of two large numbers.
        far = 0.5 * b / (root + tf.abs(z) + 1e-30)
        return tf.where(z > 0, z + far, far)

    def derivative(z):
        return function(z) / tf.sqrt(tf.square(z) + b + 1e-30)

    return ConvexActivation(function, derivative)


def sparse_plus() -> ConvexActivation:
    """0 below -1, (z + 1)^2 / 4 up to 1, then z."""
    return ConvexActivation(
        lambda z: tf.where(
            z < 1,
            0.25 * tf.square(tf.clip_by_value(z + 1.0, 0.0, 2.0)),
            z,
        ),
        lambda z: 0.5 * tf.clip_by_value(z + 1.0, 0.0, 2.0),
    )


def exponential() -> ConvexActivation:
    """Exp z."""
    return ConvexActivation(
        tf.exp, tf.exp, size=lambda size: tf.exp(size) * (1.0 + size)
    )


def _bell(z):
    """The derivative of the sigmoid, exact to rounding in its tails too."""
    e = tf.exp(-tf.abs(z))
    return e / tf.square(1.0 + e)


def sigmoid() -> BoundedActivation:
    """1 / (1 + exp -z)."""
    return BoundedActivation(
        tf.sigmoid,
        ("convex", "concave"),
        (0.0,),
        _bell,
        steepest=0.25,
        increasing=True,
    )


def log_sigmoid() -> BoundedActivation:
    """The logarithm of the sigmoid."""
    return BoundedActivation(
        lambda z: -tf.math.softplus(-z),
        ("concave",),
        (),
        lambda z: tf.sigmoid(-z),
        increasing=True,
    )


def tanh() -> BoundedActivation:
    """The hyperbolic tangent."""
    return BoundedActivation(
        tf.tanh,
        ("convex", "concave"),
        (0.0,),
        lambda z: 4.0 * _bell(2.0 * z),
        increasing=True,
    )


def softsign() -> BoundedActivation:
    """Z / (1 + |z|)."""
    return BoundedActivation(
        lambda z: z / (1.0 + tf.abs(z)),
        ("convex", "concave"),
        (0.0,),
        lambda z: 1.0 / tf.square(1.0 + tf.abs(z)),
        increasing=True,
    )


def gelu(approximate: bool = False) -> BoundedActivation:
    """Z times the normal distribution function, or Keras's guess of it."""
    if not approximate:
        root = math.sqrt(0.5)
        return _gated(
            lambda z: 0.5 * tf.math.erfc(-root * z),
            lambda z: tf.exp(-0.5 * tf.square(z)) / math.sqrt(2.0 * math.pi),
            (-math.sqrt(2.0), math.sqrt(2.0)),
            1.129,
        )
    scale = 2.0 * math.sqrt(2.0 / math.pi)

    def inner(z):
        z = tf.clip_by_value(z, -1e4, 1e4)
        return scale * (z + 0.044715 * z**3)

    def inner_slope(z):
        z = tf.clip_by_value(z, -1e4, 1e4)
        return scale * (1.0 + 3.0 * 0.044715 * tf.square(z))

    return _gated(
        lambda z: tf.sigmoid(inner(z)),
        lambda z: _bell(inner(z)) * inner_slope(z),
        (-1.4185040158, 1.4185040158),
        1.129,
    )


def silu() -> BoundedActivation:
    """Z times its sigmoid, also called swish."""
    return _gated(tf.sigmoid, _bell, (-2.3993572805, 2.3993572805), 1.1)


def mish() -> BoundedActivation:
    """Z tanh(softplus z)."""

    def gate_slope(z):
        slope = 4.0 * _bell(2.0 * tf.math.softplus(z))
        return slope * tf.sigmoid(z)

    return _gated(
        lambda z: tf.tanh(tf.math.softplus(z)),
        gate_slope,
        (-2.2563764, 1.4905712),
        1.0885,
    )


def _gated(gate, gate_slope, bends, steepest) -> BoundedActivation:
    """Z times a gate that opens from 0 to 1: bent down, up, down again."""
    return BoundedActivation(
        lambda z: z * gate(z),
        ("concave", "convex", "concave"),
        bends,
        lambda z: gate(z) + z * gate_slope(z),
        steepest=steepest,
    )


def _clipped(scale: float, shift: float, low: float) -> BoundedActivation:
    """Scale z + shift, kept in [low, 1]."""
    return piecewise_linear(
        lambda z: tf.clip_by_value(z * scale + shift, low, 1.0),
        ((low - shift) / scale, (1.0 - shift) / scale),
        steepest=scale,
        increasing=True,
    )


def hard_silu() -> BoundedActivation:
    """Z times its hard sigmoid, also called hard swish."""
    return BoundedActivation(
        lambda z: z * tf.clip_by_value(z / 6.0 + 0.5, 0.0, 1.0),
        ("linear", "convex", "linear"),
        (-3.0, 3.0),
        steepest=1.5,
    )


def soft_shrink(threshold: float) -> BoundedActivation:
    """Z moved towards 0 by the threshold, 0 within it."""
    return piecewise_linear(
        lambda z: z - tf.clip_by_value(z, -threshold, threshold),
        (-threshold, threshold),
        increasing=True,
    )


def hard_shrink(threshold: float) -> BoundedActivation:
    """Z outside of the threshold, 0 within it."""
    return piecewise_linear(
        lambda z: tf.where(tf.abs(z) > threshold, z, tf.zeros_like(z)),
        (-threshold, threshold),
        increasing=True,
        continuous=False,
    )


def prelu(layer: keras.layers.PReLU) -> BoundedActivation:
    """Leaky ReLU with trained slopes, which may become any number."""

    def slopes(dtype):
        return tf.cast(tf.convert_to_tensor(layer.alpha), dtype)

    return piecewise_linear(
        lambda z: tf.nn.relu(z) - slopes(z.dtype) * tf.nn.relu(-z),
        (0.0,),
        steepest=lambda dtype: tf.maximum(
            tf.ones([], dtype), tf.abs(slopes(dtype))
        ),
        convex_where=lambda dtype: (
            (slopes(dtype) >= 0.0) & (slopes(dtype) <= 1.0)
        ),
    )


Activation: TypeAlias = ConvexActivation | BoundedActivation

RELU = ConvexActivation(
    tf.nn.relu, lambda z: tf.cast(z > 0, z.dtype), (0.0, 1.0)
)

# Functions, each with the record of what it does by default.
_FUNCTIONS: dict[Callable, Activation] = {
    keras.activations.linear: linear(),
    keras.activations.relu: leaky_relu(0.0),
    keras.activations.leaky_relu: leaky_relu(0.2),
    keras.activations.relu6: relu(max_value=6.0),
    keras.activations.elu: elu(1.0),
    keras.activations.selu: selu(),
    keras.activations.celu: elu(1.0),
    keras.activations.softplus: softplus(),
    keras.activations.squareplus: squareplus(4.0),
    keras.activations.sparse_plus: sparse_plus(),
    keras.activations.exponential: exponential(),
    keras.activations.sigmoid: sigmoid(),
    keras.activations.log_sigmoid: log_sigmoid(),
    keras.activations.tanh: tanh(),
    keras.activations.softsign: softsign(),
    keras.activations.gelu: gelu(),
    keras.activations.silu: silu(),
    keras.activations.mish: mish(),
    keras.activations.hard_sigmoid: _clipped(1.0 / 6.0, 0.5, 0.0),
    keras.activations.hard_tanh: _clipped(1.0, 0.0, -1.0),
    keras.activations.hard_silu: hard_silu(),
    keras.activations.sparse_sigmoid: _clipped(0.5, 0.5, 0.0),
    keras.activations.soft_shrink: soft_shrink(0.5),
    keras.activations.hard_shrink: hard_shrink(0.5),
    tf.nn.relu: leaky_relu(0.0),
    tf.nn.relu6: relu(max_value=6.0),
    tf.nn.leaky_relu: leaky_relu(0.2),
    tf.nn.elu: elu(1.0),
    tf.nn.selu: selu(),
    tf.nn.softplus: softplus(),
    tf.nn.softsign: softsign(),
    tf.nn.sigmoid: sigmoid(),
    tf.nn.tanh: tanh(),
    tf.nn.gelu: gelu(),
    tf.nn.silu: silu(),
    tf.exp: exponential(),
}

# Layers, each with a function from the layer to the record.
_LAYERS: dict[type, Callable[[Any], Activation | None]] = {
    keras.layers.ReLU: lambda a: relu(
        float(a.negative_slope), a.max_value, float(a.threshold)
    ),
    keras.layers.LeakyReLU: lambda a: leaky_relu(float(a.negative_slope)),
    keras.layers.ELU: lambda a: elu(float(a.alpha)),
    keras.layers.PReLU: prelu,
    keras.layers.Activation: lambda a: from_keras(a.activation),
}

# The operations that Keras records where a function is called in a functional
# graph, each named by an example of it.
_OPERATIONS: dict[Callable, Callable[[Any], Activation | None]] = {
    keras.ops.relu: lambda op: leaky_relu(0.0),
    keras.activations.relu: lambda op: relu(
        float(op.negative_slope), op.max_value, float(op.threshold)
    ),
    keras.ops.leaky_relu: lambda op: leaky_relu(float(op.negative_slope)),
    keras.ops.relu6: lambda op: relu(max_value=6.0),
    keras.ops.elu: lambda op: elu(float(op.alpha)),
    keras.ops.selu: lambda op: selu(),
    keras.ops.celu: lambda op: celu(float(op.alpha)),
    keras.ops.softplus: lambda op: softplus(),
    keras.ops.squareplus: lambda op: squareplus(float(op.b)),
    keras.ops.sparse_plus: lambda op: sparse_plus(),
    keras.ops.exp: lambda op: exponential(),
    keras.ops.sigmoid: lambda op: sigmoid(),
    keras.ops.log_sigmoid: lambda op: log_sigmoid(),
    keras.ops.tanh: lambda op: tanh(),
    keras.ops.softsign: lambda op: softsign(),
    keras.ops.gelu: lambda op: gelu(bool(op.approximate)),
    keras.ops.silu: lambda op: silu(),
    keras.ops.abs: lambda op: piecewise_linear(tf.abs, (0.0,)),
    keras.ops.hard_sigmoid: lambda op: _clipped(1.0 / 6.0, 0.5, 0.0),
    keras.ops.hard_tanh: lambda op: _clipped(1.0, 0.0, -1.0),
    keras.ops.hard_silu: lambda op: hard_silu(),
    keras.ops.sparse_sigmoid: lambda op: _clipped(0.5, 0.5, 0.0),
    keras.ops.soft_shrink: lambda op: soft_shrink(float(op.threshold)),
    keras.ops.hard_shrink: lambda op: hard_shrink(float(op.threshold)),
}


def operation_types() -> dict[type, Callable[[Any], Activation | None]]:
    """The classes under which Keras records the activations it knows."""
    tensor = keras.KerasTensor((None, 2))
    return {
        type(operation_of(function(tensor))): form
        for function, form in _OPERATIONS.items()
    }


def register_activation(function: Callable, activation: Activation) -> None:
    """Tells the bounds how to hold an activation function of your own.

    Args:
        function: what is given to a layer as `activation`.
        activation: `keras_rub.BoundedActivation`, or for a convex function
            that never falls, `keras_rub.ConvexActivation`, which is tighter.

    Example:
    ```python
    def ramp(z):
        return keras.ops.clip(z, 0.0, 1.0)

    keras_rub.register_activation(
        ramp,
        keras_rub.BoundedActivation(
            ramp,
            shapes=("linear", "linear", "linear"),
            bends=(0.0, 1.0),
            increasing=True,
        ),
    )
    keras.layers.Dense(8, activation=ramp)
    ```
    """
    if not isinstance(activation, (ConvexActivation, BoundedActivation)):
        raise ValueError(
            "`activation` must be a BoundedActivation or a ConvexActivation. "
            f"Received: `activation={activation!r}`"
        )
    _FUNCTIONS[function] = activation


def from_keras(activation: Callable) -> Activation | None:
    """Returns how a bound holds a Keras activation, or `None`.

    Args:
        activation: function from `keras.activations`, a registered one, or a
            layer that is used as an activation.
    """
    for layer_type, form in _LAYERS.items():
        if isinstance(activation, layer_type):
            return form(activation)
    try:
        return _FUNCTIONS.get(activation)
    except TypeError:  # not hashable
        return None
