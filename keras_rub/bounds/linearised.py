"""The majorant made linear behind its first activation.

The first layer stays exact for every vertex. What follows is replaced either
by its gradient at the clean input, which gives a lower bound of the majorant
(for guesses), or by lines above every activation, which give an upper bound
(for proofs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from keras_rub.bounds import maxima
from keras_rub.bounds.majorant import Majorant, Relaxation
from keras_rub.bounds.program import (
    Affine,
    Convex,
    Max,
    Operation,
    pull_back,
)
from keras_rub.bounds.vertices import VertexBound
from keras_rub.bounds.windows import Windows


@dataclasses.dataclass
class Linearised:
    """What follows the first activation, replaced by its gradient.

    `upper` and `negative`, [batch, K - 1, ...], are the derivatives of each
    margin by U and N of the activation's output; `margins` [batch, K - 1] is
    the value at the clean input.
    """

    clean: tf.Tensor  # [batch, ...], the activation's input
    slope: tf.Tensor  # [batch, ...]
    operation: Convex
    upper: tf.Tensor
    negative: tf.Tensor
    margins: tf.Tensor


def linearise(
    relaxation: Relaxation,
    value: int,
    rest: list[Operation],
    chords: Mapping[int, tuple[tf.Tensor, tf.Tensor]] | None = None,
) -> Linearised | None:
    """Makes the majorant linear behind its first activation.

    Without `chords` by its gradient, from below; with lines above all later
    activations, from above.
    """
    readers = [op for op in rest if value in op.inputs]
    if len(readers) != 1 or not isinstance(readers[0], Convex):
        return None
    operation = readers[0]
    after = [other for other in rest if other is not operation]
    if chords is None and not relaxation.lines:
        upper, negative = _derivatives(relaxation, operation.output, after)
        margins = relaxation.clean_margins
    else:
        upper, negative, margins = _with_chords(
            relaxation, operation.output, after, chords
        )
    slope, _ = operation.activation.line(relaxation.choices[operation.output])
    return Linearised(
        relaxation.values[value], slope, operation, upper, negative, margins
    )


def _with_chords(relaxation, value, after, chords):
    """Derivatives and value of the margins where lines replace activations."""
    output = relaxation.values[value]
    competitors = relaxation.constant.shape[-1]
    center = tf.repeat(output, competitors, axis=0)
    radius = tf.zeros_like(center)
    with tf.GradientTape() as tape:
        tape.watch([center, radius])
        margins = relaxation.margins(
            {value: Majorant(center, radius)}, competitors, after, chords
        )
        own = tf.linalg.diag_part(margins)
    by_center, by_radius = tape.gradient(own, [center, radius])
    shape = tf.concat([[-1, competitors], tf.shape(output)[1:]], axis=0)
    return (
        tf.reshape((by_radius + by_center) * 0.5, shape),
        tf.reshape((by_radius - by_center) * 0.5, shape),
        own,
    )


def _derivatives(
    relaxation: Relaxation, value: int, after: list[Operation]
) -> tuple[tf.Tensor, tf.Tensor]:
    """How the margins depend on U and N of one value, at the clean input.

    All slopes are known from the clean pass, so that this is one pass backward
    and none forward.

    Returns:
        Two tensors [batch, K - 1, ...].
    """
    values, competitors = relaxation.values, relaxation.constant.shape[-1]

    def points(row, index):
        return tf.reshape(row, [-1, *values[index].shape[1:]])

    def by_sample(function, rows, parameter):
        grouped = tf.reshape(rows, [-1, competitors, *rows.shape[1:]])
        result = function(grouped, parameter[:, None])
        return tf.reshape(result, [-1, *result.shape[2:]])

    # By centre and radius, for each value that is still to be passed.
    pending: dict[int, list[tf.Tensor]] = {
        index: [points(row, index), points(tf.abs(row), index)]
        for index, row in relaxation.rows.items()
    }
    for operation in reversed(after):
        rows = pending.pop(operation.output, None)
        if rows is None:
            continue
        if isinstance(operation, Affine):
            shapes = [values[index].shape[1:] for index in operation.inputs]
            parts = [
                pull_back(operation.apply, rows[0], shapes),
                pull_back(operation.magnitude, rows[1], shapes),
            ]
        else:
            choice = relaxation.choices[operation.output]
            if isinstance(operation, Max):
                rows = [
                    maxima.spread(row, choice, operation.axes) for row in rows
                ]
            elif isinstance(operation, Convex):
                choice, _ = operation.activation.line(choice)
            parts = [[by_sample(tf.multiply, row, choice)] for row in rows]
        for number, index in enumerate(operation.inputs):
            found = [part[number] for part in parts]
            known = pending.get(index)
            pending[index] = (
                found if known is None else list(map(tf.add, known, found))
            )
    if value in pending:
        by_center, by_radius = pending[value]
    else:
        by_center = by_radius = tf.zeros(
            [
                tf.shape(values[value])[0] * competitors,
                *values[value].shape[1:],
            ],
            values[value].dtype,
        )
    shape = [-1, competitors, *values[value].shape[1:]]
    return (
        tf.reshape((by_radius + by_center) * 0.5, shape),
        tf.reshape((by_radius - by_center) * 0.5, shape),
    )


def vertex_scores(bound: VertexBound, linear: Linearised) -> tf.Tensor:
    """What each vertex adds to `linear.margins`: [batch, V, K - 1]."""
    windows = Windows.of(bound)
    if windows is None:
        return _dense_scores(bound, linear)
    return windows.gather(bound, _window_scores(bound, linear, windows))


def _dense_scores(bound: VertexBound, linear: Linearised) -> tf.Tensor:
    """Every vertex by the whole first layer."""
    width = tf.TensorShape(linear.clean.shape[1:]).num_elements()
    competitors = linear.upper.shape[1]
    clean = tf.reshape(linear.clean, [-1, 1, width])
    upper = tf.reshape(linear.upper, [-1, competitors, width])
    drop = tf.reshape(
        linear.negative * linear.slope[:, None], [-1, competitors, width]
    )
    function = linear.operation.activation.function
    start = tf.matmul(function(clean), upper, transpose_b=True)
    rho = bound.scale[:, None, None]

    def score(vertices):
        shifts = bound.shifts(vertices)
        moved = function(clean + rho * shifts)
        gain = tf.matmul(moved, upper, transpose_b=True) - start
        if bound.switches is not None:
            return gain - rho * tf.matmul(shifts, drop, transpose_b=True)
        # N is linear in the shift: one flat product for all samples.
        fall = tf.matmul(shifts, tf.reshape(drop, [-1, width]), False, True)
        fall = tf.reshape(fall, [tf.shape(vertices)[0], -1, competitors])
        return gain - rho * tf.transpose(fall, [1, 0, 2])

    return bound.over_chunks(score)


def _window_scores(
    bound: VertexBound, linear: Linearised, windows: Windows
) -> tf.Tensor:
    """Every entry of every window: [batch, 2, positions, entries, C]."""
    positions, entries = windows.reach.shape
    channels, competitors = windows.kernel.shape[-1], linear.upper.shape[1]
    function = linear.operation.activation.function
    shifts = windows.reach[..., None] * windows.kernel[None]

    def score_sample(inputs):
        clean, upper, drop, rho = inputs
        clean = tf.reshape(clean, [positions, 1, channels])
        upper, drop = (
            tf.transpose(
                tf.reshape(part, [competitors, positions, channels]), [1, 2, 0]
            )
            for part in (upper, drop)
        )
        shift = rho * shifts  # [positions, entries, channels]
        start = tf.matmul(function(clean), upper)
        fall = tf.matmul(shift, drop)
        up = tf.matmul(function(clean + shift), upper) - start - fall
        down = tf.matmul(function(clean - shift), upper) - start + fall
        return tf.stack([up, down])

    return tf.map_fn(
        score_sample,
        (
            linear.clean,
            linear.upper,
            linear.negative * linear.slope[:, None],
            bound.rho,
        ),
        fn_output_signature=tf.TensorSpec(
            [2, positions, entries, competitors], bound.x.dtype
        ),
        parallel_iterations=2,
    )
