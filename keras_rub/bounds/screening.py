"""Cheap guesses of which vertices are worth an exact evaluation.

The first layer is kept exact and the rest of the majorant is replaced by its
gradient at the clean input. The majorant is convex, so the score is never
above the true value: it finds vertices for training and counterexamples for
certification, but proves nothing.
"""

from __future__ import annotations

import tensorflow as tf

from keras_rub.bounds.first_layer import cut
from keras_rub.bounds.kinks import gains
from keras_rub.bounds.linearised import Linearised, linearise, vertex_scores
from keras_rub.bounds.majorant import Majorant
from keras_rub.bounds.maxima import places_of_largest
from keras_rub.bounds.vertices import VertexBound
from keras_rub.bounds.windows import Windows


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
        Int tensor [batch, count], the best first.
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
    return places_of_largest(tf.reduce_max(found, axis=-1), count)


def scores(bound: VertexBound) -> tf.Tensor:
    """Estimates [batch, V, K - 1] of what each vertex adds.

    Lower bounds where all competitors are searched. Where some are drawn, for
    a training step, nearly the same by less work.
    """
    found = cut(bound.relaxation)
    windows = Windows.of(bound)
    if found is None or (windows is None and bound.start is None):
        return _gradient_scores(bound)
    value, _, rest = found
    linear = linearise(bound.relaxation, value, rest)
    if linear is None:
        return _gradient_scores(bound)
    rays = linear.operation.activation.rays
    if (
        bound.relaxation.competitors.drawn is None
        or rays is None
        or bound.switches is not None
    ):
        return vertex_scores(bound, linear)
    if windows is None:
        return _rough_dense_scores(bound, linear, rays)
    return windows.gather(
        bound, _rough_window_scores(bound, linear, rays, windows)
    )


def _rough_dense_scores(
    bound: VertexBound, linear: Linearised, rays: tuple[float, float]
) -> tf.Tensor:
    """As `vertex_scores`, by a table of bends for some features at a time."""
    competitors = linear.upper.shape[1]
    width = tf.TensorShape(linear.clean.shape[1:]).num_elements()

    def flat(tensor):
        return tf.reshape(tensor, [-1, width])

    half = bound.num_vertices // 2
    clean = tf.repeat(flat(linear.clean), competitors, axis=0)
    scale = tf.repeat(bound.rho, competitors)[:, None]
    drop = flat(linear.negative * linear.slope[:, None])
    # A quarter of the budget: a table that fits the cache is no slower.
    rows = bound.memory_budget // (4 * 32 * width * bound.x.dtype.size)
    chunk = max(min(rows, half), 1)

    def of_features(first):
        sides = gains(
            clean,
            flat(linear.upper),
            drop,
            scale,
            bound.shifts(tf.range(first, min(first + chunk, half))),
            rays,
        )
        return tf.stack(sides, axis=1)  # [batch * C, 2, chunk]

    parts: list[tf.Tensor] = []
    for first in range(0, half, chunk):
        # One after the other, or all tables are in memory together.
        with tf.control_dependencies(parts[-1:]):
            parts.append(of_features(first))
    found = tf.reshape(tf.concat(parts, axis=-1), [-1, competitors, 2 * half])
    return tf.transpose(found, [0, 2, 1])


def _gradient_scores(bound: VertexBound) -> tf.Tensor:
    """The first-order change of the majorant, where no cut is known."""
    free = tf.range(bound.expansion.num_vertices)
    features, steps = bound.expansion.moves(free, bound.x.dtype)
    gradient = _gradient(bound)
    change = tf.gather(gradient, features, axis=-1) * steps
    if bound.switches is not None:
        switched = bound.switches.differences(gradient)
        change = tf.concat([change, switched], axis=-1)
    return tf.transpose(change * bound.rho[:, None, None], [0, 2, 1])


def first_order(bound: VertexBound) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest first-order value of each margin, and its vertex.

    A convex function is nowhere below its tangent, so the true maximum is at
    least as large, where every vertex may take the whole radius.

    Returns:
        Margins and vertices, both [batch, K - 1].
    """
    half = bound.num_vertices // 2
    clean = bound.relaxation.clean_margins
    if bound.switches is not None:
        change = _gradient_scores(bound)
        best = tf.argmax(change, axis=1, output_type=tf.int32)
        return clean + tf.nn.relu(tf.reduce_max(change, axis=1)), best
    if not half:
        return clean, tf.zeros_like(clean, tf.int32)
    features, steps = bound.expansion.moves(tf.range(half), bound.x.dtype)
    change = tf.gather(_gradient(bound), features, axis=-1) * steps
    best = tf.argmax(tf.abs(change), axis=-1, output_type=tf.int32)
    chosen = tf.gather(change, best, axis=-1, batch_dims=2)
    margins = clean + bound.rho[:, None] * tf.abs(chosen)
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


def _rough_window_scores(
    bound: VertexBound,
    linear: Linearised,
    rays: tuple[float, float],
    windows: Windows,
) -> tf.Tensor:
    """Scores [batch, 2, positions, entries, C] by a table of bends.

    How far a pixel moves is taken as the same for all entries of a window,
    but for those outside, which do not move at all.
    """
    positions, entries = windows.reach.shape
    channels, competitors = windows.kernel.shape[-1], linear.upper.shape[1]

    def flat(tensor):
        return tf.reshape(tensor, [-1, channels])

    shape = [-1, competitors, positions]
    most = tf.reduce_max(tf.abs(windows.reach), axis=1)
    clean = tf.reshape(linear.clean, [-1, 1, positions, channels])
    sides = gains(
        flat(tf.repeat(clean, competitors, axis=1)),
        flat(linear.upper),
        flat(linear.negative * linear.slope[:, None]),
        tf.reshape(
            tf.repeat(bound.rho[:, None, None] * most, competitors, axis=1),
            [-1, 1],
        ),
        windows.kernel,
        rays,
    )
    found = tf.reshape(tf.stack(sides), [2, *shape, entries])
    found *= tf.cast(windows.reach != 0, found.dtype)
    return tf.transpose(found, [1, 0, 3, 4, 2])
