"""Cheap guesses of which vertices are worth an exact evaluation.

The first layer is kept exact and the rest of the majorant is replaced by its
gradient at the clean input. The majorant is convex, so the score is never
above the true value: it finds vertices for training and counterexamples for
certification, but proves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from keras_rub.bounds.majorant import Majorant, Relaxation
from keras_rub.bounds.program import Affine, Convex, Operation, frontier
from keras_rub.bounds.vertex_expansion import VertexExpansion

# The widest affine map that is written out as a matrix.
WIDEST_MATRIX = 4096


@dataclasses.dataclass
class FirstLayer:
    """The network cut at the one value where it stops being affine.

    Moving feature m by s moves that value by `s * response[m]`, so a vertex
    costs one row to add and no product.
    """

    value: int
    clean: tf.Tensor  # [batch, ...]
    response: tf.Tensor  # [M, H]
    expansion: VertexExpansion | None
    rest: list[Operation]

    def shifts(self, vertices: tf.Tensor) -> tf.Tensor:
        """What a radius of one does to the value: [..., V, H]."""
        features, steps = self.expansion.moves(vertices, self.clean.dtype)
        return steps[..., None] * tf.gather(self.response, features)

    def take(self, samples: tf.Tensor) -> FirstLayer:
        """The same for some of the samples."""
        return dataclasses.replace(self, clean=tf.gather(self.clean, samples))

    def at(self, vertices: tf.Tensor, rho: tf.Tensor):
        """The value at the vertices, and the operations that follow."""
        shifts = self.shifts(vertices)
        width = self.response.shape[-1]
        flat = tf.reshape(self.clean, [-1, 1, width])
        points = flat + rho[:, None, None] * shifts
        points = tf.reshape(
            points, tf.concat([[-1], tf.shape(self.clean)[1:]], axis=0)
        )
        points = tf.ensure_shape(points, [None, *self.clean.shape[1:]])
        return {self.value: Majorant(points)}, self.rest


def _cut(relaxation: Relaxation):
    """The single value where the network stops being affine, or `None`."""
    prefix = relaxation.program.prefix()
    inside = [operation for operation in relaxation.body if operation in prefix]
    rest = [
        operation for operation in relaxation.body if operation not in prefix
    ]
    ends = frontier(
        inside, [*rest, *relaxation.suffix], relaxation.program.output
    )
    if len(ends) != 1 or not inside:
        return None
    return ends[0], inside, rest


def first_layer(
    relaxation: Relaxation, expansion: VertexExpansion | None = None
) -> FirstLayer | None:
    """Cuts the network behind a first dense layer, or returns `None`."""
    cut = _cut(relaxation)
    if cut is None:
        return None
    value, inside, rest = cut
    clean = relaxation.values[value]
    width = tf.TensorShape(clean.shape[1:]).num_elements()
    if width > WIDEST_MATRIX:
        return None
    response = matrix_of(inside, 0, value, relaxation.values)
    return FirstLayer(value, clean, response, expansion, rest)


def matrix_of(
    operations: list[Affine],
    source: int,
    target: int,
    values: Mapping[int, tf.Tensor],
) -> tf.Tensor:
    """The matrix [inputs, outputs] of a chain of affine operations.

    Row h of the gradient of output h by the input, for a batch of H inputs:
    the whole matrix in one pass backward.
    """
    width = tf.TensorShape(values[target].shape[1:]).num_elements()
    zeros = tf.zeros([width, *values[source].shape[1:]], values[source].dtype)
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        found = {source: zeros}
        for operation in operations:
            found[operation.output] = operation.apply(
                *(found[index] for index in operation.inputs)
            )
        output = tf.reshape(found[target], [width, width])
    rows = tape.gradient(
        output, zeros, output_gradients=tf.eye(width, dtype=zeros.dtype)
    )
    return tf.transpose(tf.reshape(rows, [width, -1]))


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


def reads_once(start: FirstLayer) -> bool:
    """Whether one activation, and nothing else, reads the first layer."""
    readers = [op for op in start.rest if start.value in op.inputs]
    return readers == start.rest[:1] and isinstance(readers[0], Convex)


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
    (operation,) = readers
    after = [other for other in rest if other is not operation]
    clean = relaxation.values[value]
    output = relaxation.values[operation.output]
    competitors = relaxation.constant.shape[-1]
    center = tf.repeat(output, competitors, axis=0)
    radius = tf.zeros_like(center)
    with tf.GradientTape() as tape:
        tape.watch([center, radius])
        margins = relaxation.margins(
            {operation.output: Majorant(center, radius)},
            competitors,
            after,
            chords,
        )
        own = tf.linalg.diag_part(margins)
    by_center, by_radius = tape.gradient(own, [center, radius])
    shape = tf.concat([[-1, competitors], tf.shape(clean)[1:]], axis=0)
    slope, _ = operation.activation.line(relaxation.choices[operation.output])
    return Linearised(
        clean,
        slope,
        operation,
        tf.reshape((by_radius + by_center) * 0.5, shape),
        tf.reshape((by_radius - by_center) * 0.5, shape),
        own,
    )


def screen(bound, count: int) -> tf.Tensor:
    """The most promising vertices of each sample.

    Args:
        bound: the `VertexBound`.
        count: int. How many to return, at most the number of vertices.

    Returns:
        Int tensor [batch, count].
    """
    scores = _scores(bound)  # [batch, V, K - 1]
    if bound.room is not None:
        caps = bound.caps(tf.range(bound.num_vertices))
        scores = tf.where(caps[..., None] > 0, scores, scores.dtype.min)
    if scores.shape[-1] <= count:
        # The best vertex of every competitor first, then those that come
        # closest to it.
        scores -= tf.reduce_max(scores, axis=1, keepdims=True)
    else:
        scores += bound.relaxation.clean_margins[:, None]
    _, vertices = tf.math.top_k(
        tf.reduce_max(scores, axis=-1), count, sorted=False
    )
    return vertices


def _scores(bound) -> tf.Tensor:
    """Lower estimates [batch, V, K - 1] of what each vertex adds."""
    if bound.start is not None:
        linear = linearise(
            bound.relaxation, bound.start.value, bound.start.rest
        )
        if linear is not None:
            return dense_scores(bound, linear)
    cut = _cut(bound.relaxation)
    if cut is not None:
        value, inside, rest = cut
        local = _local_layer(inside)
        linear = local and linearise(bound.relaxation, value, rest)
        if linear is not None:
            return _local_scores(bound, linear, *local)
    return _gradient_scores(bound)


def dense_scores(bound, linear: Linearised) -> tf.Tensor:
    """What each vertex adds to `linear.margins`: [batch, V, K - 1]."""
    width = bound.start.response.shape[-1]
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
        shifts = bound.start.shifts(vertices)[None]
        moved = function(clean + rho * shifts)
        gain = tf.matmul(moved, upper, transpose_b=True) - start
        # N is linear in the shift: one flat product for all samples.
        fall = tf.matmul(shifts[0], tf.reshape(drop, [-1, width]), False, True)
        fall = tf.reshape(fall, [tf.shape(vertices)[0], -1, competitors])
        return gain - rho * tf.transpose(fall, [1, 0, 2])

    return bound.over_chunks(score)


def _gradient_scores(bound) -> tf.Tensor:
    """The first-order change of the majorant, where no cut is known."""
    features, steps = bound.expansion.moves(
        tf.range(bound.num_vertices), bound.x.dtype
    )
    change = tf.gather(_gradient(bound), features, axis=-1) * steps
    return tf.transpose(change * bound.rho[:, None, None], [0, 2, 1])


def first_order(bound) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest first-order value of each margin, and its vertex.

    A convex function is nowhere below its tangent, so the true maximum is at
    least as large.

    Returns:
        Margins and vertices, both [batch, K - 1].
    """
    half = bound.num_vertices // 2
    if not half:
        clean = bound.relaxation.clean_margins
        return clean, tf.zeros_like(clean, tf.int32)
    features, steps = bound.expansion.moves(tf.range(half), bound.x.dtype)
    change = tf.gather(_gradient(bound), features, axis=-1) * steps
    best = tf.argmax(tf.abs(change), axis=-1, output_type=tf.int32)
    chosen = tf.gather(change, best, axis=-1, batch_dims=2)
    margins = bound.relaxation.clean_margins
    margins += bound.rho[:, None] * tf.abs(chosen)
    return margins, tf.where(chosen > 0, best, best + half)


def _gradient(bound) -> tf.Tensor:
    """Derivatives [batch, K - 1, M] of the majorant at the clean input."""
    relaxation = bound.relaxation
    competitors = relaxation.constant.shape[-1]
    points = tf.repeat(bound.x, competitors, axis=0)
    with tf.GradientTape() as tape:
        tape.watch(points)
        margins = relaxation.margins({0: Majorant(points)}, competitors)
        own = tf.linalg.diag_part(margins)
    return tf.reshape(
        tape.gradient(own, points),
        [-1, competitors, bound.expansion.input_size],
    )


def _local_layer(inside: list[Operation]):
    """Splits a prefix at its one convolution, or returns `None`.

    Before it, maps may only scale or move features; behind it, only scale
    channels.
    """
    at = [i for i, op in enumerate(inside) if op.convolution is not None]
    if len(at) != 1:
        return None
    before, after = inside[: at[0]], inside[at[0] + 1 :]
    if not all(operation.monomial for operation in before):
        return None
    if not all(operation.scaling for operation in after):
        return None
    layer = inside[at[0]].convolution
    ones = tf.ones([1] * (layer.rank + 1) + [layer.filters])
    if _chain(after, ones).shape != ones.shape:
        return None  # not the same at every position
    return before, inside[at[0]], after


def _chain(operations, tensor):
    for operation in operations:
        tensor = operation.apply(tensor)
    return tensor


def _moved(bound, before) -> tf.Tensor:
    """What a radius of one moves at the convolution's input, [1, ...]."""
    x = bound.x
    features, steps = bound.expansion.moves(
        tf.range(bound.num_vertices // 2), x.dtype
    )
    size = bound.expansion.input_size
    one = tf.reshape(
        tf.scatter_nd(features[:, None], steps, [size]), [1, *x.shape[1:]]
    )
    return _chain(before, one) - _chain(before, tf.zeros_like(one))


def _local_scores(bound, linear, before, convolution, after) -> tf.Tensor:
    """Scores by patches: one pixel reaches only a window of the first layer.

    Each entry of each window is scored where it stands; the scores that
    belong to one pixel are then summed by the transposed convolution.
    """
    layer = convolution.convolution
    x = bound.x
    moved = _moved(bound, before)
    kernel = tf.cast(tf.convert_to_tensor(layer.kernel), x.dtype)
    entries = tf.TensorShape(kernel.shape[:-1]).num_elements()
    picks = tf.reshape(
        tf.eye(entries, dtype=x.dtype), [*kernel.shape[:-1], entries]
    )
    reach = layer.convolution_op(moved, picks)  # [1, ..., entries]
    flat_kernel = tf.reshape(kernel, [entries, -1])
    shape = [1] * (len(reach.shape) - 1) + [kernel.shape[-1]]
    ones = tf.ones(shape, x.dtype)
    gain = _chain(after, ones) - _chain(after, tf.zeros_like(ones))
    flat_kernel *= tf.reshape(gain, [1, -1])

    positions = tf.TensorShape(reach.shape[1:-1]).num_elements()
    channels, competitors = kernel.shape[-1], linear.upper.shape[1]
    reach = tf.reshape(reach, [positions, entries, 1])
    function = linear.operation.activation.function
    sides = tf.constant([1.0, -1.0], x.dtype)

    def score_sample(inputs):
        clean, upper, drop, rho = inputs
        clean = tf.reshape(clean, [positions, 1, channels])
        upper = tf.reshape(upper, [competitors, positions, channels])
        upper = tf.transpose(upper, [1, 2, 0])
        drop = tf.reshape(drop, [competitors, positions, channels])
        drop = tf.transpose(drop, [1, 2, 0])
        shift = rho * reach * flat_kernel[None]  # [positions, entries, C]
        start = tf.matmul(function(clean), upper)
        fall = tf.matmul(shift, drop)
        return tf.stack(
            [
                tf.matmul(function(clean + side * shift), upper)
                - start
                - side * fall
                for side in (sides[0], sides[1])
            ]
        )  # [2, positions, entries, K - 1]

    local = tf.map_fn(
        score_sample,
        (
            linear.clean,
            linear.upper,
            linear.negative * linear.slope[:, None],
            bound.rho,
        ),
        fn_output_signature=tf.TensorSpec(
            [2, positions, entries, competitors], x.dtype
        ),
        parallel_iterations=2,
    )
    return _gather_local(bound, local, before, layer, picks, moved)


def _gather_local(bound, local, before, layer, picks, moved):
    """Sums the scores of all windows that read a feature."""
    competitors = local.shape[-1]
    batch = tf.shape(local)[0]
    rows = tf.transpose(local, [0, 1, 4, 2, 3])
    count = batch * 2 * competitors
    shape = tf.concat([[count], tf.shape(moved)[1:]], axis=0)
    zeros = tf.zeros(shape, moved.dtype)
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        windows = layer.convolution_op(zeros, picks)
    sums = tape.gradient(
        windows, zeros, output_gradients=tf.reshape(rows, tf.shape(windows))
    )
    # Back through the moves before the convolution. Their scale is already
    # in the scores, so it is divided out.
    sums = tf.math.divide_no_nan(sums, moved)
    inputs = tf.zeros([count, *bound.x.shape[1:]], moved.dtype)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = _chain(before, inputs)
    scores = tape.gradient(outputs, inputs, output_gradients=sums)
    scores = tf.reshape(
        scores, [batch, 2, competitors, bound.expansion.input_size]
    )
    half = bound.num_vertices // 2
    features, steps = bound.expansion.moves(tf.range(half), moved.dtype)
    scores = tf.gather(scores, features, axis=-1) * steps
    return tf.reshape(
        tf.transpose(scores, [0, 1, 3, 2]), [batch, 2 * half, competitors]
    )
