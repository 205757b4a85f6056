"""What single moves add to a weighted sum of rays, by a table of bends.

Where an activation is two rays from 0, a move s of its input z adds
`f'(z) s`, and if it crosses 0 also `(|s| - |z|)` times the change of slope.
The first part is a product of matrices. So is the second, nearly, once `|z|`
is rounded to a few levels, between which it is interpolated: all moves of all
samples then cost one product and no elementwise work of that size. The result
is a guess: good for ranking, not for proofs.
"""

from __future__ import annotations

import tensorflow as tf

_LEVELS = 4


def gains(
    clean: tf.Tensor,
    upper: tf.Tensor,
    drop: tf.Tensor,
    scale: tf.Tensor,
    response: tf.Tensor,
    rays: tuple[float, float],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Estimates `sum_h upper f(z + s) - upper f(z) - drop s`, for s and -s.

    Args:
        clean: tensor [N, H]. The inputs z of the activation.
        upper: tensor [N, H], not negative.
        drop: tensor [N, H].
        scale: tensor [N, 1], not negative.
        response: tensor [E, H]. Move e shifts row n by
            `s = scale[n] * response[e]`.
        rays: slopes of the activation left and right of 0.

    Returns:
        Two tensors [N, E].
    """
    low, high = (tf.cast(ray, clean.dtype) for ray in rays)
    slope = tf.where(clean > 0, high, low)
    linear = scale * (upper * slope - drop)
    largest = tf.reduce_max(tf.abs(response), axis=0)  # [H]
    depth = tf.math.divide_no_nan(
        tf.abs(clean) * float(_LEVELS), scale * largest
    )
    weight = (high - low) * scale * upper
    levels = tf.range(_LEVELS, dtype=clean.dtype)[:, None]
    # [N, levels, H], halved: a move of either sign takes half the sum of two
    # products, of an even and of an odd function of the response.
    share = tf.nn.relu(1.0 - tf.abs(depth[:, None] - levels))
    even = 0.5 * weight[:, None] * share
    odd = tf.where((clean > 0)[:, None], -even, even)
    # At level 0 the odd function is the move itself.
    odd += tf.cast(levels == 0, clean.dtype) * linear[:, None]
    steps = largest * levels / float(_LEVELS)  # [levels, H]
    beyond = tf.nn.relu(tf.abs(response)[:, None] - steps)  # [E, levels, H]
    signed = beyond * tf.sign(response)[:, None]
    both, turned = (
        tf.matmul(_flat(rows), _flat(table), False, True)
        for rows, table in ((even, beyond), (odd, signed))
    )
    return both + turned, both - turned


def _flat(rows: tf.Tensor) -> tf.Tensor:
    """[N, levels, H] -> [N, levels * H]."""
    return tf.reshape(rows, [-1, rows.shape[1] * rows.shape[2]])
