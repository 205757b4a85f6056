"""Which vertices need no exact evaluation, for certain.

The same scores as in screening, with every activation behind the first layer
replaced by a chord over the range that the vertices reach. The majorant is
then bounded from above, so a vertex whose score is negative is harmless.
"""

from __future__ import annotations

import tensorflow as tf

from keras_rub.bounds import screening
from keras_rub.bounds.linear import Interval, convex_lines
from keras_rub.bounds.program import Affine, Convex


def can_prune(bound) -> bool:
    """Whether the network has the form that pruning knows."""
    return (
        bound.start is not None
        and all(
            isinstance(operation, (Affine, Convex))
            and len(operation.inputs) == 1
            for operation in bound.start.rest
        )
        and screening.reads_once(bound.start)
    )


def upper_margins(bound) -> tf.Tensor:
    """Upper bounds [batch, V, K - 1] of the margins at every vertex."""
    linear = screening.linearise(
        bound.relaxation, bound.start.value, bound.start.rest, _chords(bound)
    )
    return linear.margins[:, None] + screening.dense_scores(bound, linear)


def _chords(bound) -> dict[int, tuple[tf.Tensor, tf.Tensor]]:
    """Lines above the activations over what the vertices reach.

    Each value is split into its linear part, which follows the lines that
    touch at the clean input, and an excess of U and of N above it that is
    common to all vertices. The linear part is followed for every feature, so
    its range is exact; only the excess is rounded up.
    """
    relaxation, start = bound.relaxation, bound.start
    batch = tf.shape(bound.x)[0]
    free = bound.num_vertices // 2
    features, steps = bound.expansion.moves(tf.range(free), bound.x.dtype)
    tangents = steps[:, None] * tf.gather(start.response, features)
    tangents = tf.repeat(tangents[None], batch, axis=0)
    tangents = tf.reshape(tangents, [-1, *start.clean.shape[1:]])
    value = start.clean
    upper = negative = tf.zeros_like(value)  # the excess of U and of N
    chords = {}
    for operation in start.rest:
        if isinstance(operation, Affine):
            tangents = operation.apply(tangents) - operation.apply(
                tf.zeros_like(tangents[:1])
            )
            center = operation.apply(value + (upper - negative) * 0.5)
            value = operation.apply(value)
            radius = operation.magnitude((upper + negative) * 0.5)
            upper, negative = (
                radius + (center - value),
                radius - (center - value),
            )
            continue
        grouped = tf.reshape(tangents, [batch, free, *tangents.shape[1:]])
        reach = tf.reduce_max(tf.abs(grouped), axis=1)
        shape = [-1] + [1] * (len(reach.shape) - 1)
        reach *= tf.reshape(bound.rho, shape)
        low, high = value - reach, value + reach
        activation = operation.activation
        slope, height = activation.line(relaxation.choices[operation.output])
        if height is None:
            height = tf.zeros_like(slope)
        lines = convex_lines(operation, Interval(low, high + upper), "coap")
        chords[operation.output] = (lines.upper_slope, lines.upper_height)

        # A convex function is furthest above a line at an end of its range.
        def above(end, upper=upper, slope=slope, height=height, f=activation):
            return f.function(end + upper) - slope * end - height

        upper = tf.maximum(above(low), above(high))
        negative = slope * negative
        value = slope * value + height
        tangents = tf.reshape(
            grouped * slope[:, None], [-1, *tangents.shape[1:]]
        )
    # The first activation is evaluated exactly, for each vertex.
    del chords[start.rest[0].output]
    return chords
