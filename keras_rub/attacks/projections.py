"""Projections onto balls, and onto balls within the valid range."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_rub.perturbations import PerturbationSet

# The search for the multiplier ends when the size is this near to the radius,
# relatively, or after so many rounds.
_PRECISION = 1e-6
_ROUNDS = 60


def project(
    d: tf.Tensor,
    x: tf.Tensor,
    rho: tf.Tensor,
    perturbations: PerturbationSet,
) -> tf.Tensor:
    """The nearest perturbation (in the L2 sense) that is in the set.

    The nearest point of the ball and the box together is known up to one
    multiplier, which is found by Newton's method within a bracket: for L1 it
    is a soft threshold, for L2 a common shrinking, each followed by a clip to
    the box.

    Args:
        d: tensor [batch, *features]. Any perturbation.
        x: tensor [batch, *features]. The clean inputs, inside the valid range.
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`. Norm, mask, weights, valid range.

    Returns:
        Tensor like `d`.
    """
    shape = tuple(d.shape[1:])
    size = tf.TensorShape(shape).num_elements()
    rho = tf.reshape(tf.cast(rho, d.dtype), [-1, 1])
    # A switch is no move: categories stay as they are.
    perturbations = perturbations.numeric(shape)
    weights = _flat(perturbations.weights, 1.0, shape, d.dtype)
    mask = _flat(perturbations.mask, 1.0, shape, d.dtype)
    flat = tf.reshape(d, [-1, size]) * mask
    room = perturbations.room(x)
    if room is None:
        up = down = tf.fill([1, size], tf.constant(np.inf, d.dtype))
    else:
        up, down = (tf.reshape(part, [-1, size]) for part in room)
    if perturbations.norm == "inf":
        limit = rho / weights
        flat = tf.clip_by_value(
            flat, -tf.minimum(limit, down), tf.minimum(limit, up)
        )
    else:
        ball = _L2Ball if perturbations.norm == 2 else _L1Ball
        room = tf.where(flat > 0, up, down)
        flat = tf.sign(flat) * _onto_ball(
            ball(tf.abs(flat), weights, room), rho
        )
    return tf.reshape(flat, tf.shape(d))


class _L1Ball:
    """The projection of magnitudes [batch, M], up to the multiplier."""

    def __init__(self, flat, weights, room):
        self.flat, self.weights, self.room = flat, weights, room

    def enough(self, rho):
        """A multiplier [batch, 1] that is not below the one sought."""
        del rho  # at this one every feature is 0
        return tf.reduce_max(self.flat / self.weights, axis=1, keepdims=True)

    def guess(self, rho):
        """A multiplier [batch, 1] to begin with."""
        return tf.zeros_like(rho * self.flat[:, :1])

    def at(self, multiplier):
        """The projection for a multiplier [batch, 1]."""
        return tf.minimum(
            tf.nn.relu(self.flat - multiplier * self.weights), self.room
        )

    def excess(self, values, rho):
        """By how much it leaves the ball [batch, 1]."""
        return self.size(values) - rho

    def slope(self, values, multiplier):
        """Minus the derivative of the excess by the multiplier."""
        free = tf.cast((values > 0) & (values < self.room), values.dtype)
        return tf.reduce_sum(
            free * tf.square(self.weights), axis=1, keepdims=True
        )

    def size(self, values):
        """The weighted norm [batch, 1]."""
        return tf.reduce_sum(values * self.weights, axis=1, keepdims=True)


class _L2Ball(_L1Ball):
    """The same for the L2 norm, whose square is compared."""

    def __init__(self, flat, weights, room):
        super().__init__(flat, weights, room)
        self.square = tf.square(weights)

    def enough(self, rho):
        # |w d| / (1 + m w^2) <= |d| / (m w), so this m brings it below rho.
        length = tf.norm(self.flat / self.weights, axis=1, keepdims=True)
        return tf.math.divide_no_nan(length, rho) + tf.cast(
            tf.where(rho > 0, 0.0, 1e30), rho.dtype
        )

    def guess(self, rho):
        # The one sought, if there are neither weights nor a range.
        length = tf.norm(self.flat, axis=1, keepdims=True)
        return tf.nn.relu(tf.math.divide_no_nan(length, rho) - 1.0)

    def at(self, multiplier):
        return tf.minimum(
            self.flat / (1.0 + multiplier * self.square), self.room
        )

    def excess(self, values, rho):
        return tf.square(self.size(values)) - tf.square(rho)

    def slope(self, values, multiplier):
        free = tf.cast(values < self.room, values.dtype)
        terms = tf.square(values * self.square) / (
            1.0 + multiplier * self.square
        )
        return 2.0 * tf.reduce_sum(free * terms, axis=1, keepdims=True)

    def size(self, values):
        return tf.norm(values * self.weights, axis=1, keepdims=True)


def _onto_ball(ball, rho):
    """Magnitudes [batch, M] of the nearest point."""
    start = ball.at(tf.zeros_like(rho))
    inside = ball.size(start) <= rho

    def go_on(count, low, high, multiplier, done):
        return (count < _ROUNDS) & ~tf.reduce_all(done)

    def narrow(count, low, high, multiplier, done):
        values = ball.at(multiplier)
        excess = ball.excess(values, rho)
        low = tf.where(excess > 0, multiplier, low)
        high = tf.where(excess > 0, high, multiplier)
        near = tf.abs(ball.size(values) - rho) <= _PRECISION * rho
        done |= near | (high - low <= _PRECISION * 0.1 * high)
        # Newton's step, unless it leaves the bracket; a halving every third
        # round, for the case that such steps hardly narrow it.
        slope = ball.slope(values, multiplier)
        newton = multiplier + tf.math.divide_no_nan(excess, slope)
        good = (low <= newton) & (newton <= high) & (slope > 0)
        good &= count % 3 != 2
        following = tf.where(good, newton, (low + high) / 2)
        multiplier = tf.where(done, multiplier, following)
        return count + 1, low, high, multiplier, done

    first = ball.guess(rho)
    low = tf.zeros_like(first)
    *_, multiplier, _ = tf.while_loop(
        go_on,
        narrow,
        (tf.constant(0), low, low + ball.enough(rho), first, inside),
        parallel_iterations=1,
    )
    values = ball.at(multiplier)
    # What is left outside by rounding is scaled in.
    scale = tf.minimum(tf.math.divide_no_nan(rho, ball.size(values)), 1.0)
    return tf.where(inside, start, values * scale)


def _flat(array, default, shape, dtype):
    value = default if array is None else array
    return tf.constant(np.broadcast_to(value, shape).reshape(1, -1), dtype)
