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
    if relaxation.lines:
        upper, negative, margins = _by_tape(relaxation, operation.output, after)
    else:
        upper, negative = _derivatives(
            relaxation, operation.output, after, chords or {}
        )
        margins = relaxation.clean_margins
        if chords is not None:
            clean = Majorant(relaxation.values[operation.output])
            start = {operation.output: clean}
            margins = relaxation.margins(start, 1, after, chords)[:, 0]
    slope, _ = operation.activation.line(relaxation.choices[operation.output])
    return Linearised(
        relaxation.values[value], slope, operation, upper, negative, margins
    )


def _by_tape(relaxation, value, after):
    """Derivatives and value of the margins, with lines that hold operations."""
    output = relaxation.values[value]
    competitors = relaxation.constant.shape[-1]
    center = tf.repeat(output, competitors, axis=0)
    radius = tf.zeros_like(center)
    with tf.GradientTape() as tape:
        tape.watch([center, radius])
        margins = relaxation.margins(
            {value: Majorant(center, radius)}, competitors, after
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
    relaxation: Relaxation,
    value: int,
    after: list[Operation],
    chords: Mapping[int, tuple[tf.Tensor, tf.Tensor]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """How the margins depend on U and N of one value, at the clean input.

    All slopes are known from the clean pass, or those of the `chords`, so that
    this is one pass backward and none forward.

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
            if operation.output in chords:
                # U follows the chord and N the line: what the one is steeper
                # by goes to U, half of the sum of centre and radius.
                steeper = 0.5 * (chords[operation.output][0] - choice)
                both = by_sample(tf.multiply, rows[0] + rows[1], steeper)
                parts = [[part + both] for (part,) in parts]
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
    activation = linear.operation.activation
    if activation.rays is not None and bound.switches is None:
        return _ray_scores(bound, clean, upper, drop, activation.rays)
    rho = bound.scale[:, None, None]
    function = activation.function
    start = tf.matmul(function(clean), upper, transpose_b=True)

    def score(vertices):
        shifts = bound.shifts(vertices)
        moved = function(clean + rho * shifts)
        gain = tf.matmul(moved, upper, transpose_b=True) - start
        if bound.switches is not None:
            return gain - rho * tf.matmul(shifts, drop, transpose_b=True)
        return gain - rho * _for_all_samples(shifts, drop)

    return bound.over_chunks(score)


def _ray_scores(
    bound: VertexBound,
    clean: tf.Tensor,
    upper: tf.Tensor,
    drop: tf.Tensor,
    rays: tuple[float, float],
) -> tf.Tensor:
    """The same for an activation of two rays, by a fraction of the work.

    Args:
        bound: the `VertexBound`.
        clean: tensor [batch, 1, H]. The activation's input.
        upper: tensor [batch, C, H].
        drop: tensor [batch, C, H].
        rays: slopes of the activation left and right of 0.
    """
    rho = bound.scale[:, None, None]
    low, high = (tf.cast(ray, clean.dtype) for ray in rays)
    slopes = upper * tf.where(clean > 0, high, low) - drop
    bends = _Bends.of(bound, clean, (high - low) * upper)

    def score(vertices):
        shifts = bound.shifts(vertices)
        return rho * _for_all_samples(shifts, slopes) + bends.at(shifts)

    return bound.over_chunks(score)


def _for_all_samples(shifts: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Shifts [V, H] times rows [batch, C, H]^T, in one flat product."""
    width, competitors = shifts.shape[-1], rows.shape[1]
    product = tf.matmul(tf.reshape(rows, [-1, width]), shifts, transpose_b=True)
    shape = [-1, competitors, tf.shape(shifts)[0]]
    return tf.transpose(tf.reshape(product, shape), [0, 2, 1])


@dataclasses.dataclass
class _Bends:
    """What the first activation adds where a vertex crosses its kink.

    Two rays are a line on either side of 0, so only neurons matter that some
    vertex takes across, which are few: `neurons` [batch, S]. There a vertex
    adds `weight` times how far it gets beyond 0.
    """

    neurons: tf.Tensor
    move: tf.Tensor  # [batch, S, 1], of a vertex towards 0 and beyond
    distance: tf.Tensor  # [batch, S, 1], of the clean value from 0
    weight: tf.Tensor  # [batch, C, S]

    @classmethod
    def of(
        cls, bound: VertexBound, clean: tf.Tensor, weight: tf.Tensor
    ) -> _Bends:
        """From inputs [batch, 1, H] and what a bend weighs, [batch, C, H]."""
        everything = tf.range(bound.num_vertices)
        reach = tf.reduce_max(tf.abs(bound.shifts(everything)), axis=0)
        clean, rho = clean[:, 0], bound.rho[:, None]
        # The negation, so that NaN is among them.
        crossed = tf.cast(~(rho * reach < tf.abs(clean)), clean.dtype)
        count = tf.cast(tf.reduce_max(tf.reduce_sum(crossed, axis=1)), tf.int32)
        _, neurons = tf.math.top_k(crossed, count)
        clean = tf.gather(clean, neurons, batch_dims=1)[..., None]
        towards = tf.where(clean > 0, -rho[..., None], rho[..., None])
        weight = tf.gather(weight, neurons, axis=2, batch_dims=1)
        return cls(neurons, towards, tf.abs(clean), weight)

    def at(self, shifts: tf.Tensor) -> tf.Tensor:
        """What shifts [V, H] of the first layer add: [batch, V, C]."""
        moves = tf.gather(tf.transpose(shifts), self.neurons)
        beyond = tf.nn.relu(self.move * moves - self.distance)
        return tf.transpose(tf.matmul(self.weight, beyond), [0, 2, 1])


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
