"""Maxima over one or several axes, and where they are attained.

Axes are negative, counted from the end, and given from the last to the first,
so that each keeps its number while those behind it are taken away.
"""

from __future__ import annotations

import functools

import tensorflow as tf

# Up to so many entries are compared one by one, which is faster than a
# reduction over an inner axis.
_FEW = 4


def largest(tensor: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """The maximum over the axes, which are taken away."""
    return _reduce(tensor, axes, tf.maximum, tf.reduce_max)


def total(tensor: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """The sum over the axes, which are taken away."""
    return _reduce(tensor, axes, tf.add, tf.reduce_sum)


def first_largest(tensor: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """1 at the first place that attains the maximum, else 0; like `tensor`."""
    axis, others = axes[0], axes[1:]
    size = tensor.shape[axis]
    if size == 2:
        one, two = tf.unstack(tensor, axis=axis)
        first = tf.cast(one >= two, tensor.dtype)
        mask = tf.stack([first, 1.0 - first], axis=axis)
    else:
        mask = tf.one_hot(
            tf.argmax(tensor, axis=axis),
            size,
            axis=axis % len(tensor.shape),
            dtype=tensor.dtype,
        )
    if not others:
        return mask
    shifted = tuple(other + 1 for other in others)
    rest = first_largest(largest(tensor, (axis,)), shifted)
    return mask * tf.expand_dims(rest, axis)


def spread(tensor: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """Puts axes of size one back where `largest` took them away."""
    for axis in axes:
        tensor = tf.expand_dims(tensor, axis)
    return tensor


def copied(
    tensor: tf.Tensor, axes: tuple[int, ...], sizes: tf.TensorShape
) -> tf.Tensor:
    """Puts the axes back with `sizes` copies of what `largest` left.

    TensorFlow multiplies no tensors that must be copied along many axes.
    """
    tensor = spread(tensor, axes)
    for axis in axes:
        tensor = tf.repeat(tensor, sizes[axis], axis=axis)
    return tensor


def _reduce(tensor, axes, pairwise, along):
    for taken, axis in enumerate(axes):
        axis += taken
        if tensor.shape[axis] <= _FEW:
            parts = tf.unstack(tensor, axis=axis)
            tensor = functools.reduce(pairwise, parts)
        else:
            tensor = along(tensor, axis=axis)
    return tensor
