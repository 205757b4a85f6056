"""Which vertices need no exact evaluation, for certain.

The same scores as in screening, with every activation behind the first layer
replaced by a chord over the range that the vertices reach. The majorant is
then bounded from above, so a vertex whose score is negative is harmless.
"""

from __future__ import annotations

import tensorflow as tf

from keras_rub.bounds.first_layer import WIDEST_MATRIX, FirstLayer, matrix_of
from keras_rub.bounds.linear import convex_lines
from keras_rub.bounds.linearised import linearise, vertex_scores
from keras_rub.bounds.lines import Interval
from keras_rub.bounds.program import Affine, Convex
from keras_rub.bounds.vertices import VertexBound


def can_prune(bound: VertexBound) -> bool:
    """Whether the network is a chain that is narrow enough.

    Behind a convolution hardly a vertex can be pruned, at radii that matter,
    and to find out costs more than to evaluate them.
    """
    if bound.start is None or not bound.start.is_read_once:
        return False
    if not bound.num_vertices or bound.switches is not None:
        return False
    value = bound.start.value
    for operation in bound.start.rest:
        shape = bound.relaxation.values[operation.output].shape[1:]
        if (
            not isinstance(operation, (Affine, Convex))
            or (isinstance(operation, Affine) and operation.convolution)
            or operation.inputs != (value,)
            or tf.TensorShape(shape).num_elements() > WIDEST_MATRIX
        ):
            return False
        value = operation.output
    return True


def sample_bytes(bound: VertexBound) -> int:
    """About what `upper_margins` takes for one sample."""
    assert bound.start is not None
    widest = max(
        tf.TensorShape(bound.relaxation.values[index].shape[1:]).num_elements()
        for index in (
            bound.start.value,
            *(op.output for op in bound.start.rest),
        )
    )
    competitors = bound.relaxation.constant.shape[-1]
    # The moves of all features before and after a product, and the margins.
    entries = 3 * bound.num_vertices * (widest // 2 + competitors)
    return bound.x.dtype.size * entries


def upper_margins(bound: VertexBound) -> tf.Tensor:
    """Upper bounds [batch, V, K - 1] of the margins at every vertex."""
    start = bound.start
    if start is None or not can_prune(bound):
        raise ValueError("The network is no chain of narrow layers.")
    linear = linearise(
        bound.relaxation, start.value, start.rest, _chords(bound, start)
    )
    assert linear is not None  # the first layer is read once
    return linear.margins[:, None] + vertex_scores(bound, linear)


def _chords(
    bound: VertexBound, start: FirstLayer
) -> dict[int, tuple[tf.Tensor, tf.Tensor]]:
    """Lines above the activations over what the vertices reach.

    Each value is split into its linear part, which follows the lines that
    touch at the clean input, and an excess of U and of N above it that is
    common to all vertices. The linear part is followed for every feature, so
    its range is exact; only the excess is rounded up.
    """
    relaxation = bound.relaxation
    free = bound.num_vertices // 2
    features, steps = bound.expansion.moves(tf.range(free), bound.x.dtype)
    # How much each feature moves the linear part: [batch or 1, M, width].
    tangents = (steps[:, None] * tf.gather(start.response, features))[None]
    source, value = start.value, start.clean
    slope = None  # of the activation that the tangents have yet to pass
    upper = negative = tf.zeros_like(value)  # the excess of U and of N
    chords = {}
    for operation in start.rest:
        if isinstance(operation, Affine):
            matrix = matrix_of(
                [operation], source, operation.output, relaxation.values
            )
            # The slopes go into the smaller factor of the product.
            if slope is not None and free < matrix.shape[1]:
                tangents = tangents * tf.reshape(
                    slope, [-1, 1, matrix.shape[0]]
                )
            elif slope is not None:
                matrix = tf.reshape(slope, [-1, matrix.shape[0], 1]) * matrix
            tangents, slope = _product(tangents, matrix), None
            center = operation.apply(value + (upper - negative) * 0.5)
            value = operation.apply(value)
            radius = operation.magnitude((upper + negative) * 0.5)
            shift = center - value
            upper, negative = radius + shift, radius - shift
        elif isinstance(operation, Convex):
            reach = tf.maximum(
                tf.reduce_max(tangents, axis=1),
                -tf.reduce_min(tangents, axis=1),
            )
            reach = tf.reshape(reach * bound.rho[:, None], tf.shape(value))
            activation = operation.activation
            slope, height = activation.line(
                relaxation.choices[operation.output]
            )
            if height is None:
                height = tf.zeros_like(slope)
            low, high = value - reach, value + reach
            lines = convex_lines(operation, Interval(low, high + upper), "coap")
            chords[operation.output] = (lines.upper_slope, lines.upper_height)
            # A convex function is furthest above a line at an end.
            above = [
                activation.function(end + upper) - slope * end - height
                for end in (low, high)
            ]
            upper, negative = tf.maximum(*above), slope * negative
            value = slope * value + height
        source = operation.output
    # The first activation is evaluated exactly, for each vertex.
    del chords[start.rest[0].output]
    return chords


def _product(rows: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """[batch, M, H] times [H, H'] in one flat product, or by sample."""
    if matrix.shape.rank == 3:
        return tf.matmul(rows, matrix)
    height, width = matrix.shape
    flat = tf.matmul(tf.reshape(rows, [-1, height]), matrix)
    return tf.reshape(flat, [-1, rows.shape[1], width])
