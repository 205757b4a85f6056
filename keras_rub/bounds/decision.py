"""What is proved: the one place that says yes.

All of it is TensorFlow code, so that `certify`, the metric of a training step
and a served graph decide by the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_rub.bounds import pruning, screening
from keras_rub.bounds.methods import Method
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.vertices import VertexBound

# Vertices that are tried first where a valid range is given: most samples that
# can't be certified show it at one of them.
_QUICK = 8

# Vertices of one sample that are evaluated together.
_GROUP = 8

# A certified radius below this is returned as 0.
_SMALLEST_RADIUS = 1e-9


def is_negative(margins: tf.Tensor, allowance: tf.Tensor) -> tf.Tensor:
    """Which margins are below 0 by more than rounding can hide.

    A comparison with NaN is false: NaN proves nothing.
    """
    return margins < -allowance


def is_proved(margins: tf.Tensor, allowance: tf.Tensor) -> tf.Tensor:
    """Which samples [batch] have all margins [batch, K - 1] negative."""
    return tf.reduce_all(is_negative(margins, allowance), axis=-1)


class Decision(NamedTuple):
    """What is known of a batch once its certificates are decided.

    `margins` [batch, K - 1] are upper bounds, infinite for a sample with a
    vertex that breaks them. `witnesses` [batch, W] are the vertices that come
    closest to breaking a sample, to be tried first at the next radius.
    """

    proved: tf.Tensor
    margins: tf.Tensor
    witnesses: tf.Tensor


def no_witnesses(problem: Problem, method: Method, count: tf.Tensor):
    """Vertices [count, W] to begin with: any will do."""
    width = problem.program.num_classes - 1 if method.uses_vertices else 1
    return tf.zeros([count, width], tf.int32)


def decide(
    problem: Problem,
    method: Method,
    x: tf.Tensor,
    labels: tf.Tensor,
    rho: tf.Tensor,
    witnesses: tf.Tensor | None = None,
) -> Decision:
    """Decides which samples the method proves, by as little work as it can.

    Args:
        problem: the network and the attacker.
        method: one that can be traced.
        x: tensor [batch, *features].
        labels: int tensor [batch].
        rho: tensor [batch].
        witnesses: int tensor [batch, W], or `None`. Vertices to try first.
    """
    allowance = problem.allowance(x, labels, rho)
    if not method.uses_vertices:
        margins = method.function(problem, x, labels, rho)
        if witnesses is None:
            witnesses = no_witnesses(problem, method, tf.shape(labels)[0])
        return Decision(is_proved(margins, allowance), margins, witnesses)
    return _decide_by_vertices(problem, x, labels, rho, allowance, witnesses)


def _decide_by_vertices(problem, x, labels, rho, allowance, witnesses):
    """A quick look at a few vertices, then all of them where it is open."""
    bound = problem.vertex_bound(x, labels, rho)
    margins, found = _quick(bound)
    open_ = is_proved(margins, allowance)
    if witnesses is not None and bound.num_vertices:
        if bound.room is not None:
            # In a mixture, a vertex that is listed twice would count twice.
            witnesses = witnesses[:, :1]
        open_ &= is_proved(bound.worst_case(witnesses).margins, allowance)

    def finish():
        rows = tf.where(open_)
        some = [tf.gather(t, rows[:, 0]) for t in (x, labels, rho, allowance)]
        exact, vertices = _finish(problem.vertex_bound(*some[:3]), some[3])
        broken = tf.fill(tf.shape(margins), tf.cast(np.inf, margins.dtype))
        return (
            tf.tensor_scatter_nd_update(broken, rows, exact),
            tf.tensor_scatter_nd_update(found, rows, vertices),
        )

    def none_open():
        broken = tf.fill(tf.shape(margins), tf.cast(np.inf, margins.dtype))
        return broken, found

    margins, found = tf.cond(tf.reduce_any(open_), finish, none_open)
    return Decision(is_proved(margins, allowance), margins, found)


def _quick(bound: VertexBound) -> tuple[tf.Tensor, tf.Tensor]:
    """Margins that the bound is certain to reach, and where."""
    if bound.room is None:
        return screening.first_order(bound)
    worst = bound.worst_case(screening.candidates(bound, _QUICK))
    return worst.margins, worst.vertices[..., 0]


def _finish(
    bound: VertexBound, allowance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Bounds of samples that no quick look decided, and the worst vertices."""
    if bound.room is not None or not pruning.can_prune(bound):
        worst = bound.worst_case()
        return worst.margins, worst.vertices[..., 0]
    upper = pruning.upper_margins(bound)
    score = tf.reduce_max(upper + allowance[:, None], axis=-1)
    # The negation, so that NaN counts as risky.
    risky = tf.logical_not(score < 0)
    exact = _at_risky(bound, tf.where(risky, score, -np.inf))
    lowest = tf.cast(upper.dtype.min, upper.dtype)
    harmless = tf.reduce_max(tf.where(risky[..., None], lowest, upper), axis=1)
    clean = bound.relaxation.clean_margins
    margins = tf.maximum(tf.maximum(exact, harmless), clean)
    return margins, tf.argmax(upper, axis=1, output_type=tf.int32)


def _at_risky(bound: VertexBound, score: tf.Tensor) -> tf.Tensor:
    """Largest exact value [batch, K - 1] where `score` is not -inf.

    The risky vertices of a sample are evaluated in small groups, so that
    what belongs to the sample is read once for each of them.
    """
    counts = tf.reduce_sum(tf.cast(score > -np.inf, tf.int32), axis=1)
    groups = -(-tf.reduce_max(counts) // _GROUP)
    _, order = tf.math.top_k(
        score, tf.minimum(groups * _GROUP, bound.num_vertices)
    )
    # The last group may repeat the sample's first vertex.
    missing = groups * _GROUP - tf.shape(order)[1]
    order = tf.concat([order, tf.repeat(order[:, :1], missing, axis=1)], axis=1)
    order = tf.reshape(order, [-1, groups, _GROUP])
    first = tf.range(groups) * _GROUP
    wanted = tf.cast(tf.where(first[None] < counts[:, None]), tf.int32)
    values = _at_groups(bound, order, wanted)
    return tf.math.unsorted_segment_max(
        values, wanted[:, 0], tf.shape(score)[0]
    )


def _at_groups(
    bound: VertexBound, order: tf.Tensor, wanted: tf.Tensor
) -> tf.Tensor:
    """Largest values [G, K - 1] of groups [G, 2] of sample and number."""
    rows = max(bound.memory_budget // bound.row_bytes() // _GROUP, 1)
    total = tf.shape(wanted)[0]
    width = bound.relaxation.constant.shape[-1]
    dtype = bound.x.dtype
    parts = tf.TensorArray(dtype, size=0, dynamic_size=True, infer_shape=False)

    def step(first, parts):
        last = tf.minimum(first + rows, total)
        some = wanted[first:last]
        vertices = tf.gather_nd(order, some)
        values = bound.take(some[:, 0]).at(vertices)
        values = tf.where(tf.math.is_nan(values), dtype.max, values)
        values = tf.reduce_max(values, axis=1)
        return last, parts.write(parts.size(), values)

    # A part with no rows, so that there is always one.
    parts = parts.write(0, tf.zeros([0, width], dtype))
    _, parts = tf.while_loop(
        lambda first, parts: first < total,
        step,
        (tf.constant(0), parts),
        parallel_iterations=1,
    )
    return tf.ensure_shape(parts.concat(), [None, width])


# Radii -----------------------------------------------------------------------


def largest_radius(
    prove: Callable[
        [tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]
    ],
    usable: tf.Tensor,
    witnesses: tf.Tensor,
    tolerance: float,
    max_radius: float,
) -> tf.Tensor:
    """The largest radius that is proved, sample by sample, by bisection.

    Args:
        prove: function of sample numbers [n], radii [n] (float64) and
            witnesses [n, W] to a boolean [n] and new witnesses [n, W].
        usable: boolean tensor [batch]. The others get 0.
        witnesses: int tensor [batch, W], handed on from one radius to the
            next.
        tolerance: float. The radius returned is proved, and within this
            fraction of one that is not.
        max_radius: float. Larger ones are returned as this.

    Returns:
        Float64 tensor [batch]. It works eagerly and in a graph.
    """
    count = tf.shape(usable)
    low = tf.zeros(count, tf.float64)
    high = tf.fill(count, tf.constant(np.inf, tf.float64))
    guess = tf.fill(count, tf.constant(min(1.0, max_radius), tf.float64))

    def step(low, high, guess, open_, witnesses):
        rows = tf.where(open_)
        some = rows[:, 0]
        proved, found = prove(
            some, tf.gather(guess, some), tf.gather(witnesses, some)
        )
        proved = tf.scatter_nd(rows, proved, tf.cast(count, tf.int64))
        witnesses = tf.tensor_scatter_nd_update(witnesses, rows, found)
        low = tf.where(proved, guess, low)
        high = tf.where(open_ & ~proved, guess, high)
        guess = _next_guess(low, high, max_radius)
        open_ &= ~_is_finished(low, high, tolerance, max_radius)
        return low, high, guess, open_, witnesses

    low, *_ = tf.while_loop(
        lambda low, high, guess, open_, witnesses: tf.reduce_any(open_),
        step,
        (low, high, guess, usable, witnesses),
        parallel_iterations=1,
    )
    return low


def _next_guess(low, high, max_radius):
    """Doubles until a radius fails, then halves the bracket."""
    bounded = tf.math.is_finite(high)
    ceiling = tf.where(bounded, high, 0.0)
    # Nothing proved yet: the radius may be many times smaller.
    inside = tf.where(low > 0, 0.5 * (low + ceiling), ceiling / 8.0)
    return tf.where(bounded, inside, tf.minimum(2.0 * low, max_radius))


def _is_finished(low, high, tolerance, max_radius):
    narrow = high - low <= tolerance * high
    return tf.where(
        tf.math.is_finite(high),
        narrow | (high < _SMALLEST_RADIUS),
        low >= max_radius,
    )
