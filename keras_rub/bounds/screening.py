"""Cheap guesses of which vertices are worth an exact evaluation.

The first layer is kept exact and the rest of the majorant is replaced by its
gradient at the clean input. The majorant is convex, so the score is never
above the true value: it finds vertices for training and counterexamples for
certification, but proves nothing.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_rub.bounds.first_layer import cut
from keras_rub.bounds.kinks import gains
from keras_rub.bounds.linearised import Linearised, dense_scores, linearise
from keras_rub.bounds.majorant import Majorant
from keras_rub.bounds.program import Affine
from keras_rub.bounds.vertices import VertexBound


def candidates(bound: VertexBound, vertices: int | str) -> tf.Tensor | None:
    """The vertices that training evaluates.

    Args:
        bound: the `VertexBound`.
        vertices: how many vertices a sample, or `"all"`.

    Returns:
        Int tensor [batch, vertices], or `None` for all of them.
    """
    if isinstance(vertices, str) or vertices >= bound.num_vertices:
        return None
    return screen(bound, vertices)


def screen(bound: VertexBound, count: int) -> tf.Tensor:
    """The most promising vertices of each sample.

    Args:
        bound: the `VertexBound`.
        count: int. How many to return, at most the number of vertices.

    Returns:
        Int tensor [batch, count].
    """
    found = scores(bound)  # [batch, V, K - 1]
    if bound.room is not None:
        caps = bound.caps(tf.range(bound.num_vertices))
        found = tf.where(caps[..., None] > 0, found, found.dtype.min)
    if found.shape[-1] <= count:
        # The best vertex of every competitor first, then those that come
        # closest to it.
        found -= tf.reduce_max(found, axis=1, keepdims=True)
    else:
        found += bound.relaxation.clean_margins[:, None]
    _, vertices = tf.math.top_k(
        tf.reduce_max(found, axis=-1), count, sorted=False
    )
    return vertices


def scores(bound: VertexBound) -> tf.Tensor:
    """Estimates [batch, V, K - 1] of what each vertex adds.

    Lower bounds where all competitors are searched. Where some are drawn, for
    a training step, nearly the same by less work.
    """
    if bound.start is not None:
        linear = linearise(
            bound.relaxation, bound.start.value, bound.start.rest
        )
        if linear is not None:
            if _is_rough(bound, linear):
                return _rough_dense_scores(bound, linear)
            return dense_scores(bound, linear)
    found = cut(bound.relaxation)
    if found is not None:
        value, inside, rest = found
        local = _local_layer(inside)
        if local is not None:
            linear = linearise(bound.relaxation, value, rest)
            if linear is not None:
                return _local_scores(bound, linear, *local)
    return _gradient_scores(bound)


def _is_rough(bound: VertexBound, linear: Linearised) -> bool:
    return (
        bound.relaxation.competitors.drawn is not None
        and linear.operation.activation.rays is not None
    )


def _rough_dense_scores(bound: VertexBound, linear: Linearised) -> tf.Tensor:
    """As `dense_scores`, by a table of bends for some features at a time."""
    competitors = linear.upper.shape[1]
    width = tf.TensorShape(linear.clean.shape[1:]).num_elements()

    def flat(tensor):
        return tf.reshape(tensor, [-1, width])

    half = bound.num_vertices // 2
    clean = tf.repeat(flat(linear.clean), competitors, axis=0)
    scale = tf.repeat(bound.rho, competitors)[:, None]
    drop = flat(linear.negative * linear.slope[:, None])
    rows = bound.memory_budget // (32 * width * bound.x.dtype.size)
    chunk = max(min(rows, half), 1)

    def of_features(first):
        sides = gains(
            clean,
            flat(linear.upper),
            drop,
            scale,
            bound.shifts(tf.range(first, min(first + chunk, half))),
            linear.operation.activation.rays,
        )
        return tf.stack(sides, axis=1)  # [batch * C, 2, chunk]

    parts = [of_features(first) for first in range(0, half, chunk)]
    found = tf.reshape(tf.concat(parts, axis=-1), [-1, competitors, 2 * half])
    return tf.transpose(found, [0, 2, 1])


def _gradient_scores(bound: VertexBound) -> tf.Tensor:
    """The first-order change of the majorant, where no cut is known."""
    features, steps = bound.expansion.moves(
        tf.range(bound.num_vertices), bound.x.dtype
    )
    change = tf.gather(_gradient(bound), features, axis=-1) * steps
    return tf.transpose(change * bound.rho[:, None, None], [0, 2, 1])


def first_order(bound: VertexBound) -> tuple[tf.Tensor, tf.Tensor]:
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


def _gradient(bound: VertexBound) -> tf.Tensor:
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


def _local_layer(
    inside: list[Affine],
) -> tuple[list[Affine], keras.layers.Layer, list[Affine]] | None:
    """Splits a prefix at its one convolution, or returns `None`.

    Before it, maps may only scale or move features; behind it, only scale
    channels.
    """
    at = [
        (i, op.convolution)
        for i, op in enumerate(inside)
        if op.convolution is not None
    ]
    if len(at) != 1:
        return None
    ((index, layer),) = at
    before, after = inside[:index], inside[index + 1 :]
    if not all(operation.monomial for operation in before):
        return None
    if not all(operation.scaling for operation in after):
        return None
    ones = tf.ones([1] * (layer.rank + 1) + [layer.filters])
    if _chain(after, ones).shape != ones.shape:
        return None  # not the same at every position
    return before, layer, after


def _chain(operations, tensor):
    for operation in operations:
        tensor = operation.apply(tensor)
    return tensor


def _moved(bound: VertexBound, before: list[Affine]) -> tf.Tensor:
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


def _local_scores(
    bound: VertexBound,
    linear: Linearised,
    before: list[Affine],
    layer: keras.layers.Layer,
    after: list[Affine],
) -> tf.Tensor:
    """Scores by patches: one pixel reaches only a window of the first layer.

    Each entry of each window is scored where it stands; the scores that
    belong to one pixel are then summed by the transposed convolution.
    """
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
    if _is_rough(bound, linear):
        local = _rough_local_scores(bound, linear, reach, flat_kernel)
        return _gather_local(bound, local, before, layer, picks, moved)
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


def _rough_local_scores(
    bound: VertexBound,
    linear: Linearised,
    reach: tf.Tensor,
    kernel: tf.Tensor,
) -> tf.Tensor:
    """Scores [batch, 2, positions, entries, C] by a table of bends.

    How far a pixel moves is taken as the same for all entries of a window,
    but for those outside, which do not move at all.
    """
    positions, entries = reach.shape[0], reach.shape[1]
    channels, competitors = kernel.shape[-1], linear.upper.shape[1]

    def flat(tensor):
        return tf.reshape(tensor, [-1, channels])

    shape = [-1, competitors, positions]
    most = tf.reduce_max(tf.abs(reach), axis=1)[:, 0]
    clean = tf.reshape(linear.clean, [-1, 1, positions, channels])
    sides = gains(
        flat(tf.repeat(clean, competitors, axis=1)),
        flat(linear.upper),
        flat(linear.negative * linear.slope[:, None]),
        tf.reshape(
            tf.repeat(bound.rho[:, None, None] * most, competitors, axis=1),
            [-1, 1],
        ),
        kernel,
        linear.operation.activation.rays,
    )
    found = tf.reshape(tf.stack(sides), [2, *shape, entries])
    found *= tf.cast(reach[..., 0] != 0, found.dtype)
    return tf.transpose(found, [1, 0, 3, 4, 2])


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
