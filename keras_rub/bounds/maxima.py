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

_BLOCK = 32  # entries whose maximum is taken before they are sorted


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
    return mask * spread(rest, tensor, (axis,))


def places_of_largest(values: tf.Tensor, count: int) -> tf.Tensor:
    """Places [batch, count] of the largest of [batch, V], the best first.

    They are in the blocks that have the largest maxima, and a maximum is far
    cheaper than a partial sort.
    """
    size = values.shape[-1]
    if size is None or size % _BLOCK or size < 4 * count * _BLOCK:
        return tf.math.top_k(values, count).indices
    blocks = tf.reshape(values, [-1, size // _BLOCK, _BLOCK])
    chosen = tf.math.top_k(tf.reduce_max(blocks, axis=-1), count).indices
    inside = tf.gather(blocks, chosen, batch_dims=1)
    places = tf.math.top_k(
        tf.reshape(inside, [-1, count * _BLOCK]), count
    ).indices
    first = tf.gather(chosen, places // _BLOCK, batch_dims=1) * _BLOCK
    return first + places % _BLOCK


def spread(
    tensor: tf.Tensor, like: tf.Tensor, axes: tuple[int, ...]
) -> tf.Tensor:
    """Repeats entries along the axes that `largest` took away from `like`.

    Axes of size one would do, but for the number of dimensions that
    TensorFlow can broadcast.
    """
    for axis in axes:
        tensor = tf.expand_dims(tensor, axis)
        tensor = tf.repeat(tensor, like.shape[axis], axis=axis)
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
