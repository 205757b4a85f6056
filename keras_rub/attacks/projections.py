"""Projections onto balls, and onto balls within the valid range."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_rub.uncertainty import PerturbationSet

# Halvings of the bracket of the multiplier: past float32's own precision.
_HALVINGS = 40


def project(
    d: tf.Tensor,
    x: tf.Tensor,
    rho: tf.Tensor,
    perturbations: PerturbationSet,
) -> tf.Tensor:
    """The nearest perturbation (in the L2 sense) that is in the set.

    The nearest point of the ball and the box together is known up to one
    multiplier, which is found by bisection: for L1 it is a soft threshold,
    for L2 a common shrinking, each followed by a clip to the box.

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
    elif perturbations.norm == 2:
        flat = _onto_ball(flat, rho, weights, up, down, _shrink, _l2_size)
    else:
        flat = _onto_ball(flat, rho, weights, up, down, _soft, _l1_size)
    return tf.reshape(flat, tf.shape(d))


def _onto_ball(flat, rho, weights, up, down, shrink, size):
    """Finds the multiplier by bisection; 0 where d is inside already."""

    def at(multiplier):
        return tf.clip_by_value(shrink(flat, multiplier, weights), -down, up)

    inside = size(at(tf.zeros_like(rho)), weights) <= rho
    # An upper end: at it every feature is 0, or the ball's size is reached.
    high = _enough(flat, rho, weights, shrink)
    low = tf.zeros_like(high)
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        outside = size(at(middle), weights) > rho
        low = tf.where(outside, middle, low)
        high = tf.where(outside, high, middle)
    # The upper end of the bracket is the side that is in the ball.
    return tf.where(inside, at(tf.zeros_like(rho)), at(high))


def _enough(flat, rho, weights, shrink):
    if shrink is _soft:
        return tf.reduce_max(tf.abs(flat) / weights, axis=1, keepdims=True)
    # |w d| / (1 + m w^2) <= |d| / (m w), so this m brings it below rho.
    length = tf.norm(flat / weights, axis=1, keepdims=True)
    return tf.math.divide_no_nan(length, rho) + tf.cast(
        tf.where(rho > 0, 0.0, 1e30), flat.dtype
    )


def _soft(flat, multiplier, weights):
    return tf.sign(flat) * tf.nn.relu(tf.abs(flat) - multiplier * weights)


def _shrink(flat, multiplier, weights):
    return flat / (1.0 + multiplier * tf.square(weights))


def _l1_size(flat, weights):
    return tf.reduce_sum(tf.abs(flat) * weights, axis=1, keepdims=True)


def _l2_size(flat, weights):
    return tf.norm(flat * weights, axis=1, keepdims=True)


def _flat(array, default, shape, dtype):
    value = default if array is None else array
    return tf.constant(np.broadcast_to(value, shape).reshape(1, -1), dtype)
