"""The largest margins by branch and bound: few vertices are evaluated.

`pruning` bounds the margins at all vertices from above. The vertices that look
worst are evaluated; what they reach makes most others harmless, and those that
are left are evaluated too. Wherever a vertex is not, its upper bound stands in
for it, so that the result is a bound whatever was left out.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_rub.bounds import knapsack, pruning
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.vertices import VertexBound, not_nan

# Vertices of one sample that are evaluated together.
_GROUP = 4

# Vertices of each sample that are evaluated first. In a valid range a worst
# case mixes several.
_FIRST = 2
_FIRST_MIXED = 8

# Batches of fewer samples are scanned: what pruning saves there, if it does, is
# no more than what it takes to try.
_FEWEST = 64

# Samples that are tried first, and the part of their vertices that may be left
# so that the others are pruned too: to prune costs 0.4 of a full scan, and
# small groups a third more than large ones.
_TRIED = 8
_MOST_LEFT = 0.4


def largest_margins(
    problem: Problem,
    x: tf.Tensor,
    labels: tf.Tensor,
    rho: tf.Tensor,
    allowance: tf.Tensor,
) -> tf.Tensor:
    """Bounds of the margins, as low as those of all vertices where it counts.

    The largest margin of a sample, with and without its allowance, is that of
    `VertexBound.worst_case`. Other competitors may get a larger margin than
    there, but none above the largest.

    Args:
        problem: the network and an L1 attacker.
        x: tensor [batch, *features].
        labels: int tensor [batch].
        rho: tensor [batch].
        allowance: tensor [batch, K - 1]; see `rounding`.

    Returns:
        Tensor [batch, K - 1].
    """
    bound = problem.vertex_bound(x, labels, rho)
    if not pruning.can_prune(bound):
        return bound.worst_case().margins
    total, width = tf.shape(x)[0], allowance.shape[-1]
    bytes_ = max(pruning.sample_bytes(bound), _FIRST_MIXED * bound.row_bytes())
    most = max(bound.memory_budget // bytes_, 1)
    inputs = (x, labels, rho)

    def step(first, helps, parts):
        tries = helps & (first == 0)
        size = tf.where(tries, min(_TRIED, most), most)
        last = tf.minimum(first + size, total)
        bound = problem.vertex_bound(*(part[first:last] for part in inputs))
        limit = allowance[first:last]
        margins, helps = tf.cond(
            helps,
            lambda: _pruned(bound, limit),
            lambda: (bound.worst_case().margins, False),
        )
        return last, helps, parts.write(parts.size(), margins)

    parts = tf.TensorArray(
        x.dtype, size=0, dynamic_size=True, infer_shape=False
    ).write(0, tf.zeros([0, width], x.dtype))
    *_, parts = tf.while_loop(
        lambda first, *_: first < total,
        step,
        (tf.constant(0), total >= _FEWEST, parts),
        parallel_iterations=1,
    )
    return tf.ensure_shape(parts.concat(), [None, width])


def risky_margins(bound: VertexBound, allowance: tf.Tensor) -> tf.Tensor:
    """Bounds of the margins that tell which samples have all of them negative.

    Vertices that can't break their sample are not evaluated. In a valid range
    mixtures would have to be told apart, for which at radii that are nearly
    too large a full scan is cheaper.

    Args:
        bound: the `VertexBound`.
        allowance: tensor [batch, K - 1]; see `rounding`.

    Returns:
        Tensor [batch, K - 1].
    """
    if bound.room is not None or not pruning.can_prune(bound):
        return bound.worst_case().margins
    known = not_nan(pruning.upper_margins(bound))
    score = not_nan(tf.reduce_max(known + allowance[:, None], axis=-1))
    known = _evaluate(bound, known, tf.where(score < 0, -np.inf, score))
    return bound.worst_of(tf.range(bound.num_vertices), known).margins


def _pruned(
    bound: VertexBound, allowance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Margins [batch, K - 1], and whether that was less work than a scan."""
    everything = tf.range(bound.num_vertices)
    known = not_nan(pruning.upper_margins(bound))
    score = tf.reduce_max(known, axis=-1)
    count = _FIRST
    if bound.room is not None:
        # Without room for it, a vertex is no part of any mixture.
        movable = bound.caps(everything) > 0
        score = tf.where(movable, score, -np.inf)
        count = _FIRST_MIXED
    _, first = tf.math.top_k(score, min(count, bound.num_vertices))
    values = not_nan(bound.at(first))
    places = _places(tf.range(tf.shape(first)[0])[:, None], first)
    known = tf.tensor_scatter_nd_update(known, places, values)
    score = tf.tensor_scatter_nd_update(
        score, places, tf.fill(tf.shape(first), tf.cast(-np.inf, score.dtype))
    )
    lower, least = _reached(bound, first, values)
    allowance = allowance[:, None]
    best = tf.reduce_max(lower[:, None], axis=-1, keepdims=True)
    risk = tf.reduce_max(lower[:, None] + allowance, axis=-1, keepdims=True)

    def matters(margins):
        """Whether margins may exceed what is reached; so does NaN."""
        return ~((margins <= best) & (margins + allowance <= risk))

    if bound.room is None:
        risky = matters(known)
    else:
        # A mixture is nowhere above the largest of its parts.
        parts = tf.where(movable[..., None], known, -np.inf)
        upper = tf.reduce_max(parts, axis=1, keepdims=True)
        risky = matters(upper) & ~(known <= least[:, None])
    risky = tf.reduce_any(risky, axis=-1) & (score > -np.inf)
    known = _evaluate(bound, known, tf.where(risky, score, -np.inf))
    left = tf.reduce_mean(tf.cast(risky, known.dtype))
    return bound.worst_of(everything, known).margins, left < _MOST_LEFT


def _places(samples: tf.Tensor, vertices: tf.Tensor) -> tf.Tensor:
    """Samples [N, 1] and their vertices [N, V] as indices [N, V, 2]."""
    samples = tf.broadcast_to(samples, tf.shape(vertices))
    return tf.stack([samples, vertices], axis=-1)


def _reached(
    bound: VertexBound, vertices: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """What some vertices reach, and what another one must exceed to add to it.

    In a valid range both follow from a knapsack. Let p be the gain of the last
    item that went in where it is full, else 0. All items together gain at most
    `p + sum_v cap_v * relu(gain_v - p)`, since the shares are at most 1 in sum
    and each at most its cap. With equality for the items in question, and no
    term for an item that gains at most p: such a one changes nothing.

    Args:
        bound: the `VertexBound`.
        vertices: int tensor [batch, V].
        values: tensor [batch, V, K - 1], the majorant there.

    Returns:
        Tensors [batch, K - 1].
    """
    clean = bound.relaxation.clean_margins
    if bound.room is None:
        largest = tf.maximum(tf.reduce_max(values, axis=1), clean)
        return largest, largest
    caps = bound.caps(vertices)
    gains = tf.nn.relu(values - clean[:, None]) * tf.sign(caps)[..., None]
    filled = knapsack.fill(
        tf.transpose(gains, [0, 2, 1]), caps, tf.shape(vertices)[1]
    )
    reached = tf.reduce_sum(filled.shares * filled.gains, axis=-1)
    return clean + reached, clean + knapsack.price(filled)


def _evaluate(
    bound: VertexBound, known: tf.Tensor, score: tf.Tensor
) -> tf.Tensor:
    """Margins [batch, V, K - 1], exact where the score [batch, V] is finite.

    The vertices of a sample are evaluated in small groups, so that what
    belongs to the sample is read once for each of them.
    """
    counts = tf.reduce_sum(tf.cast(score > -np.inf, tf.int32), axis=1)
    groups = -(-tf.reduce_max(counts) // _GROUP)
    _, order = tf.math.top_k(
        score, tf.minimum(groups * _GROUP, bound.num_vertices)
    )
    # The last group may repeat the sample's first vertex.
    missing = groups * _GROUP - tf.shape(order)[1]
    order = tf.concat([order, tf.repeat(order[:, :1], missing, axis=1)], axis=1)
    order = tf.reshape(order, [tf.shape(score)[0], groups, _GROUP])
    first = tf.range(groups) * _GROUP
    wanted = tf.cast(tf.where(first[None] < counts[:, None]), tf.int32)
    rows = max(bound.memory_budget // bound.row_bytes() // _GROUP, 1)
    total = tf.shape(wanted)[0]

    def step(first, known):
        last = tf.minimum(first + rows, total)
        some = wanted[first:last]
        vertices = tf.gather_nd(order, some)
        values = not_nan(bound.take(some[:, 0]).at(vertices))
        places = _places(some[:, :1], vertices)
        return last, tf.tensor_scatter_nd_update(known, places, values)

    _, known = tf.while_loop(
        lambda first, known: first < total,
        step,
        (tf.constant(0), known),
        parallel_iterations=1,
    )
    return known
