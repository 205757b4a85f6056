"""What is proved: the one place that says yes.

All of it is TensorFlow code, so that `certify`, the metric of a training step
and a served graph decide by the same operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_rub.bounds import branching, radii, rounding, screening
from keras_rub.bounds.majorant import Relaxation
from keras_rub.bounds.methods import Method
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.vertices import VertexBound

# Vertices that are tried first where a valid range is given: most samples that
# can't be certified show it at one of them.
_QUICK = 8

# Vertices by which a radius is guessed, and that are tried first at each test
# of it. With a valid range, a worst case mixes several of them: as many more
# as it takes until these could use up the radius so many times.
_WITNESSES = 16
_MIXED_WITNESSES = 64
_TIMES_USED_UP = 4.0

# How much closer a guess is than the radius that is asked for.
_GUESS_ACCURACY = 0.1


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
    vertex that breaks them.
    """

    proved: tf.Tensor
    margins: tf.Tensor


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
        witnesses: int tensor [batch, W], or `None`. Vertices to try first,
            each once. Defaults to `None`, those that a quick look finds.
    """
    allowance = problem.allowance(x, labels, rho)
    if not method.uses_vertices:
        margins = method.function(problem, x, labels, rho)
        return Decision(is_proved(margins, allowance), margins)
    bound = problem.vertex_bound(x, labels, rho)
    if witnesses is None or not bound.num_vertices:
        margins = _quick(bound)
    else:
        margins = bound.worst_case(witnesses).margins
    open_ = is_proved(margins, allowance)
    broken = tf.fill(tf.shape(margins), tf.cast(np.inf, margins.dtype))

    def finish():
        rows = tf.where(open_)
        some = [tf.gather(t, rows[:, 0]) for t in (x, labels, rho, allowance)]
        bound = problem.vertex_bound(*some[:3])
        exact = branching.risky_margins(bound, some[3])
        return tf.tensor_scatter_nd_update(broken, rows, exact)

    margins = tf.cond(tf.reduce_any(open_), finish, lambda: broken)
    return Decision(is_proved(margins, allowance), margins)


def settle(
    problem: Problem,
    method: Method,
    x: tf.Tensor,
    labels: tf.Tensor,
    rho: tf.Tensor,
) -> Decision:
    """Decides, and finds the largest margin of each sample.

    Args:
        problem: the network and the attacker.
        method: one that can be traced.
        x: tensor [batch, *features].
        labels: int tensor [batch].
        rho: tensor [batch].

    Returns:
        A `Decision` whose largest margin is that of the method. The others
        are upper bounds.
    """
    allowance = problem.allowance(x, labels, rho)
    if method.uses_vertices:
        margins = branching.largest_margins(problem, x, labels, rho, allowance)
    else:
        margins = method.function(problem, x, labels, rho)
    return Decision(is_proved(margins, allowance), margins)


class Radius(NamedTuple):
    """The largest radii of a batch that a method proves.

    `usable` [batch] says which samples are proved at a radius of 0; the
    others have a `radius` [batch] (float64) of 0. `witnesses` [batch, W] are
    the vertices that end it.
    """

    usable: tf.Tensor
    radius: tf.Tensor
    witnesses: tf.Tensor


def find_radius(
    problem: Problem,
    method: Method,
    x: tf.Tensor,
    labels: tf.Tensor,
    tolerance: tf.Tensor,
    max_radius: tf.Tensor,
) -> Radius:
    """The largest radius that the method proves, sample by sample.

    Args:
        problem: the network and the attacker.
        method: one that can be traced.
        x: tensor [batch, *features].
        labels: int tensor [batch].
        tolerance: float64 tensor []; see `radii.largest_radius`.
        max_radius: float64 tensor []; see `radii.largest_radius`.
    """
    clean = problem.clean(x)
    relaxation = Relaxation(problem.program, clean, problem.competitors(labels))
    margins = relaxation.clean_margins

    def allowance(rho):
        return rounding.allowance(relaxation, rho, problem.perturbations)

    ones = tf.ones(tf.shape(labels), x.dtype)
    limit = tf.cast(max_radius, x.dtype)
    if method.uses_vertices:
        start, witnesses = _first_witnesses(problem, x, labels, clean, limit)
    else:
        start = tf.minimum(ones, limit)
        witnesses = tf.zeros([tf.shape(labels)[0], 0], tf.int32)

    def score(rho):
        if method.uses_vertices:
            bound = problem.vertex_bound(x, labels, rho, clean=clean)
            found = bound.worst_case(witnesses).margins
        else:
            found = method.function(problem, x, labels, rho)
        return tf.reduce_max(found + allowance(rho), axis=-1)

    def prove(rows, rho):
        return decide(
            problem,
            method,
            tf.gather(x, rows),
            tf.gather(labels, rows),
            tf.cast(rho, x.dtype),
            tf.gather(witnesses, rows) if method.uses_vertices else None,
        ).proved

    accuracy = _GUESS_ACCURACY * tf.cast(tolerance, x.dtype)
    at_zero = tf.reduce_max(margins + allowance(0.0 * ones), axis=-1)
    guess = radii.zero_of(score, start, at_zero, accuracy, limit)
    usable = is_proved(margins, allowance(0.0 * ones))
    radius = radii.largest_radius(prove, usable, guess, tolerance, max_radius)
    return Radius(usable, radius, witnesses)


def _first_witnesses(problem, x, labels, clean, limit):
    """A radius that is about right, and the worst vertices there."""
    ones = tf.ones(tf.shape(labels), x.dtype)
    bound = problem.vertex_bound(x, labels, ones, clean=clean)
    if not bound.num_vertices:
        return limit * ones, tf.zeros([tf.shape(labels)[0], 0], tf.int32)
    margins = bound.relaxation.clean_margins
    # The majorant is convex, so that this radius is not too small.
    largest, _ = screening.first_order(bound)
    slopes = tf.math.divide_no_nan(largest - margins, bound.rho[:, None])
    reached = tf.math.divide_no_nan(-margins, slopes)
    reached = tf.reduce_min(tf.where(reached > 0, reached, limit), axis=-1)
    start = tf.minimum(reached, limit)
    bound = problem.vertex_bound(x, labels, start, clean=clean)
    most = _WITNESSES if bound.room is None else _MIXED_WITNESSES
    best = screening.screen(bound, min(most, bound.num_vertices))
    if bound.room is None or bound.num_vertices <= _WITNESSES:
        return start, best
    used_up = tf.cumsum(bound.caps(best), axis=1) >= _TIMES_USED_UP
    enough = tf.reduce_all(used_up, axis=0)
    count = 1 + tf.reduce_sum(tf.cast(~enough, tf.int32))
    return start, best[:, : tf.maximum(count, _WITNESSES)]


def _quick(bound: VertexBound) -> tf.Tensor:
    """Margins that the bound is certain to reach."""
    if bound.room is None:
        return screening.first_order(bound)[0]
    return bound.worst_case(screening.candidates(bound, _QUICK)).margins
