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
    linear = tf.matmul(scale * (upper * slope - drop), response, False, True)
    largest = tf.reduce_max(tf.abs(response), axis=0)  # [H]
    depth = tf.math.divide_no_nan(
        tf.abs(clean) * float(_LEVELS), scale * largest
    )
    weight = (high - low) * scale * upper
    levels = tf.range(_LEVELS, dtype=clean.dtype)[:, None]
    share = tf.nn.relu(1.0 - tf.abs(depth[:, None] - levels))
    # [N, 2 * levels * H]: rows that lie below 0, and rows above.
    below = tf.where(clean > 0, 0.0, weight)[:, None] * share
    above = tf.where(clean > 0, weight, 0.0)[:, None] * share
    rows = tf.reshape(
        tf.concat([below, above], axis=1),
        [-1, 2 * _LEVELS * response.shape[-1]],
    )
    steps = largest * levels / float(_LEVELS)  # [levels, H]
    rise, fall = (
        tf.nn.relu(side[:, None] - steps) for side in (response, -response)
    )
    table = tf.reshape(
        tf.stack(
            [
                tf.concat([rise, fall], axis=1),
                tf.concat([fall, rise], axis=1),
            ]
        ),
        [-1, rows.shape[-1]],
    )  # [2 * E, 2 * levels * H]
    up, down = tf.split(tf.matmul(rows, table, False, True), 2, axis=1)
    return up + linear, down - linear
