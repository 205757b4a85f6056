"""The search for the largest radius that is proved.

A guess says where it is, tests say what is true. A good guess takes two tests
and no guess changes the answer, which is that of plain bisection.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

# A certified radius below this is returned as 0.
_SMALLEST_RADIUS = 1e-9

# Evaluations of a bound that a guess may take, and how much it may grow from
# one to the next while nothing is known above it.
_EVALUATIONS = 8
_GROWTH = 8.0


def zero_of(
    score: Callable[[tf.Tensor], tf.Tensor],
    start: tf.Tensor,
    at_zero: tf.Tensor,
    accuracy: tf.Tensor,
    largest: tf.Tensor,
) -> tf.Tensor:
    """About where a rising function of the radius crosses 0, by secants.

    Args:
        score: function of radii [batch] to values [batch].
        start: tensor [batch]. The radii to try first.
        at_zero: tensor [batch]. The values at a radius of 0; where one is not
            negative the result means nothing.
        accuracy: tensor []. The relative change that ends the search.
        largest: tensor [] or [batch]. Larger results are given as this.

    Returns:
        Tensor [batch].
    """

    def step(number, rho, was_below, low, f_low, high, f_high, moved):
        del moved
        value = score(rho)
        # NaN and infinity are above 0.
        below = value < 0
        # Two values below 0 are extended to 0.
        beyond = rho + tf.math.divide_no_nan(value * (rho - low), f_low - value)
        beyond = tf.where(value > f_low, beyond, _GROWTH * rho)
        beyond = tf.minimum(beyond, _GROWTH * rho)
        # An end that stays twice counts half, so that both close in.
        stays = tf.where(below == was_below, 0.5, tf.ones_like(value))
        first = tf.math.is_inf(high)
        f_low = tf.where(below, value, tf.where(first, 1.0, stays) * f_low)
        f_high = tf.where(below, stays * f_high, value)
        low, high = tf.where(below, rho, low), tf.where(below, high, rho)
        share = tf.math.divide_no_nan(-f_low, f_high - f_low)
        share = tf.where(tf.math.is_finite(f_high), share, 0.1)
        inside = low + share * (high - low)
        new = tf.where(tf.math.is_finite(high), inside, beyond)
        new = tf.minimum(new, largest)
        moved = tf.abs(new - rho) > accuracy * rho
        return number + 1, new, below, low, f_low, high, f_high, moved

    zeros = tf.zeros_like(start)
    state = (
        tf.constant(0),
        start,
        tf.zeros_like(start, tf.bool),
        zeros,
        at_zero,
        zeros + np.inf,
        zeros + np.inf,
        tf.ones_like(start, tf.bool),
    )
    found = tf.while_loop(
        lambda number, *rest: tf.reduce_any(rest[-1]),
        step,
        state,
        maximum_iterations=_EVALUATIONS,
        parallel_iterations=1,
    )
    return found[1]


def largest_radius(
    prove: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    usable: tf.Tensor,
    guess: tf.Tensor,
    tolerance: float | tf.Tensor,
    max_radius: float | tf.Tensor,
    proved: tf.Tensor | None = None,
) -> tf.Tensor:
    """The largest radius that is proved, sample by sample.

    It is what bisection finds that begins at 1, doubles until a radius fails
    and then halves the bracket. The guess tells how its tests would end, so
    that only the two at the end need be made; where one ends otherwise, the
    guess is moved.

    Args:
        prove: function of sample numbers [n] and radii [n] (float64) to a
            boolean [n].
        usable: boolean tensor [batch]. The others get 0.
        guess: tensor [batch]. About where the radii are.
        tolerance: float, or float64 tensor []. The radius returned is
            proved, and within this fraction of one that is not.
        max_radius: float, or float64 tensor []. Larger ones are returned as
            this.
        proved: tensor [batch], or `None`. Radii that are proved already.

    Returns:
        Float64 tensor [batch]. It works eagerly and in a graph.
    """
    guess, tolerance, max_radius = (
        tf.cast(value, tf.float64) for value in (guess, tolerance, max_radius)
    )
    count = tf.shape(usable)
    zeros = tf.zeros(count, tf.float64)
    low = zeros if proved is None else tf.cast(proved, tf.float64)
    high, stride = zeros + np.inf, zeros + tolerance

    def next_test(low, high, guess):
        """The next radius to test, and where there is one."""
        below, above = _bisect(low, high, guess, tolerance, max_radius)
        test_low = below > low
        return (
            tf.where(test_low, below, above),
            usable & (test_low | (above < high)),
        )

    def step(low, high, guess, stride, radius, open_):
        rows = tf.where(open_)
        yes = prove(rows[:, 0], tf.gather(radius, rows[:, 0]))
        yes = tf.scatter_nd(rows, yes, tf.cast(count, tf.int64))
        no = open_ & ~yes
        low, high = tf.where(yes, radius, low), tf.where(no, radius, high)
        # Where the guess was wrong, it moves by strides that double.
        wrong = (yes & (radius > guess)) | (no & (radius <= guess))
        moved = radius * tf.where(yes, 1.0 + stride, 1.0 - stride)
        middle = tf.where(low > 0, 0.5 * (low + high), high / 8.0)
        moved = tf.where((moved > low) & (moved < high), moved, middle)
        guess = tf.where(wrong, moved, guess)
        stride = tf.where(wrong, 2.0 * stride, stride)
        return low, high, guess, stride, *next_test(low, high, guess)

    low, *_ = tf.while_loop(
        lambda low, high, guess, stride, radius, open_: tf.reduce_any(open_),
        step,
        (low, high, guess, stride, *next_test(low, high, guess)),
        parallel_iterations=1,
    )
    return tf.where(usable, low, 0.0)


def _bisect(low, high, guess, tolerance, max_radius):
    """The last bracket of a bisection whose tests end as the guess says."""

    def step(below, above, radius, open_):
        yes = (radius <= low) | ((radius <= guess) & (radius < high))
        below = tf.where(open_ & yes, radius, below)
        above = tf.where(open_ & ~yes, radius, above)
        open_ &= ~_is_finished(below, above, tolerance, max_radius)
        return below, above, _next_radius(below, above, max_radius), open_

    zeros = tf.zeros_like(guess)
    below, above, *_ = tf.while_loop(
        lambda below, above, radius, open_: tf.reduce_any(open_),
        step,
        (
            zeros,
            zeros + np.inf,
            zeros + tf.minimum(tf.constant(1.0, guess.dtype), max_radius),
            tf.ones_like(guess, tf.bool),
        ),
        parallel_iterations=1,
    )
    return below, above


def _next_radius(low, high, max_radius):
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
