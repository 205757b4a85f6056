"""Two lines that hold an activation over the range its input reaches.

A line above f over a range may have any slope, if its height is the largest
value of `f(z) - slope * z` there. So the slope is only a guess, made for the
line that is lowest in the middle of the range, and the height is what is
proved: on a convex piece of f the largest value is at an end, and on a concave
piece it is bracketed by bisection and bounded by the tangent at the bracket.
A line below f is a line above -f, upside down.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

SHAPES = ("convex", "concave", "linear")

# Halvings of a bracket. What is left of it only makes a line higher.
_HALVINGS = 18

# Rounding of a function and of its derivative, as a multiple of epsilon.
_ROUNDING = 8.0


class Interval(NamedTuple):
    """Bounds [batch, ...] of a value over the whole perturbation set."""

    low: tf.Tensor
    high: tf.Tensor


class Lines(NamedTuple):
    """Two lines that hold an activation over its range, or a maximum."""

    upper_slope: tf.Tensor
    upper_height: tf.Tensor
    lower_slope: tf.Tensor
    lower_height: tf.Tensor


@dataclasses.dataclass(frozen=True)
class BoundedActivation:
    """An elementwise function that bends at known points.

    Between the bends it is convex, concave or linear. A bound holds it
    between two lines over the range that its input reaches.

    Args:
        function: f, elementwise on a float tensor of any type and shape, or
            on one [..., features] if it differs between features.
        shapes: the shapes of its pieces from left to right, each
            `"convex"`, `"concave"` or `"linear"`. A kink may lie inside a
            convex or a concave piece, if it bends the same way.
        bends: the points where the pieces meet, one fewer than `shapes`.
            Defaults to `()`, one piece.
        derivative: f', one of the one-sided ones at a kink. Defaults to
            `None`, the gradient of `function`.
        steepest: float, or a function of the type to a tensor that
            broadcasts to z. No slope of f is larger in magnitude. Defaults
            to `1.0`.
        increasing: bool. Whether f never falls. Defaults to `False`.
        continuous: bool. Whether f has no jump at the bends. Defaults to
            `True`.
        convex_where: function of the type to a boolean tensor that
            broadcasts to z: the entries whose function is convex and never
            falls, for all z. Defaults to `None`, none of them.

    Example:
    ```python
    # A ramp from 0 to 1.
    ramp = keras_rub.BoundedActivation(
        lambda z: tf.clip_by_value(z, 0.0, 1.0),
        shapes=("linear", "linear", "linear"),
        bends=(0.0, 1.0),
        increasing=True,
    )
    ```
    """

    function: Callable[[tf.Tensor], tf.Tensor]
    shapes: Sequence[str]
    bends: Sequence[float] = ()
    derivative: Callable[[tf.Tensor], tf.Tensor] | None = None
    steepest: float | Callable[[tf.DType], tf.Tensor] = 1.0
    increasing: bool = False
    continuous: bool = True
    convex_where: Callable[[tf.DType], tf.Tensor] | None = None

    def __post_init__(self):
        bends = list(self.bends)
        if len(self.shapes) != len(bends) + 1 or bends != sorted(set(bends)):
            raise ValueError(
                "`bends` must be growing numbers, one fewer than `shapes`. "
                f"Received: `shapes={self.shapes!r}, bends={self.bends!r}`"
            )
        if not set(self.shapes) <= set(SHAPES):
            raise ValueError(
                f"`shapes` must be made of {', '.join(SHAPES)}. "
                f"Received: `shapes={self.shapes!r}`"
            )

    def slope_at(self, z: tf.Tensor) -> tf.Tensor:
        """The derivative f' at z."""
        if self.derivative is not None:
            return self.derivative(z)
        with tf.GradientTape() as tape:
            tape.watch(z)
            value = self.function(z)
        return tape.gradient(value, z, unconnected_gradients="zero")

    def largest_slope(self, dtype: tf.DType) -> tf.Tensor:
        """`steepest` as a tensor."""
        if callable(self.steepest):
            return tf.cast(self.steepest(dtype), dtype)
        return tf.constant(self.steepest, dtype)

    def magnitude(self, size: tf.Tensor) -> tf.Tensor:
        """The largest magnitude of f where that of its input is `size`."""
        zero = tf.zeros_like(size[:1])
        steepest = self.largest_slope(size.dtype)
        return steepest * size + tf.abs(self.function(zero))

    def image(self, interval: Interval) -> Interval:
        """The range of f over a range."""
        low, high = interval
        if self.increasing:
            ends = self.function(low), self.function(high)
            slack = _ROUNDING * _epsilon(low) * tf.maximum(*map(tf.abs, ends))
            return Interval(ends[0] - slack, ends[1] + slack)
        flat = tf.zeros_like(low)
        highest, lowest = self._tops(interval, flat, flat)
        return Interval(-lowest, highest)

    def lines(self, interval: Interval) -> Lines:
        """Lines [batch, ...] above and below f over ranges [batch, ...].

        They hold whatever their slopes are. Slopes and heights have the
        gradient by the ends of the range that their formulas have: a slope is
        best for the middle of the range only, and what reads the line reads
        it elsewhere, so that its change counts. Points that a search found
        stay where they are: there the value is stationary.
        """
        upper, lower = (
            self._slope_between(interval, *anchors)
            for anchors in self._anchors(interval)
        )
        highest, lowest = self._tops(interval, upper, lower)
        return Lines(upper, highest, lower, -lowest)

    # Heights: these prove -----------------------------------------------------

    def _tops(self, interval: Interval, upper, lower):
        """Largest values of `f - upper * z` and of `lower * z - f`."""
        low, high = interval
        epsilon = _epsilon(low)
        steepest = self.largest_slope(low.dtype)
        points = [low, high, *self._bends_in(interval, both_sides=True)]
        values = [self.function(point) for point in points]
        far = tf.maximum(tf.abs(low), tf.abs(high))
        found = []
        for sign, slope in ((1.0, upper), (-1.0, lower)):
            sizes = [tf.abs(value) for value in values]
            tops = [
                sign * (value - slope * point)
                for point, value in zip(points, values, strict=True)
            ]
            for start, end in self._curved(sign, interval):
                top, size = self._top_of_concave(sign, slope, start, end)
                # A derivative that is a little off misses the place.
                tops.append(
                    top + _ROUNDING * epsilon * steepest * (end - start)
                )
                sizes.append(size)
            size = functools.reduce(tf.maximum, sizes) + tf.abs(slope) * far
            top = functools.reduce(tf.maximum, tops)
            found.append(top + _ROUNDING * epsilon * tf.stop_gradient(size))
        return found

    def _top_of_concave(self, sign, slope, start, end):
        """Upper bound of `sign * (f - slope * z)`, concave on a piece."""

        def rises(z):
            return sign * (self.slope_at(z) - slope) > 0

        found = _bisect(rises, *map(tf.stop_gradient, (start, end)))
        # The top moves with the range only where it is at an end of it.
        left, right = (
            tf.where(point == place, place, point)
            for point, place in zip(
                map(tf.stop_gradient, found), (start, end), strict=True
            )
        )
        at_left, at_right = self.function(left), self.function(right)
        steep = tf.nn.relu(sign * (self.slope_at(left) - slope))
        top = tf.maximum(
            sign * (at_left - slope * left) + steep * (right - left),
            sign * (at_right - slope * right),
        )
        return top, tf.maximum(tf.abs(at_left), tf.abs(at_right))

    def _curved(self, sign: float, interval: Interval):
        """The ends, in the range, of the pieces where sign * f is concave."""
        ends = [-np.inf, *self.bends, np.inf]
        wanted = "concave" if sign > 0 else "convex"
        return [
            (_inside(start, interval), _inside(end, interval))
            for start, end, shape in zip(
                ends[:-1], ends[1:], self.shapes, strict=True
            )
            if shape == wanted
        ]

    def _bends_in(self, interval: Interval, both_sides: bool = False):
        """The bends that lie in the range, others moved to its ends."""
        found = []
        for bend in self.bends:
            found.append(_inside(bend, interval))
            if both_sides and not self.continuous:
                dtype = interval.low.dtype.as_numpy_dtype
                for end in (-np.inf, np.inf):
                    beside = np.nextafter(dtype(bend), dtype(end))
                    found.append(_inside(beside, interval))
        return found

    # Slopes: these only guess -------------------------------------------------

    def _anchors(self, interval: Interval):
        """Where the lines that are best in the middle meet f.

        Returns:
            For the line above and the line below, two points: it goes through
            both, or is the tangent where they are the same.
        """
        low, high = interval = Interval(*map(tf.stop_gradient, interval))
        middle = _middle(interval)
        points = [low, high, middle, *self._bends_in(interval, True)]
        searches = [
            (sign, side, end, *piece)
            for sign in (1.0, -1.0)
            for piece in self._curved(sign, interval)
            for side, end in ((1.0, low), (-1.0, high))
        ]
        if searches:
            points += tf.unstack(self._touching(searches), len(searches))
        stack = tf.stack(points)
        values = self.function(stack)
        return [
            [
                tf.stop_gradient(anchor)
                for anchor in self._best_anchors(sign, interval, stack, values)
            ]
            for sign in (1.0, -1.0)
        ]

    def _slope_between(self, interval: Interval, start, end) -> tf.Tensor:
        """The slope of the line through f at two points, or of its tangent."""
        places = (*interval, _middle(interval))

        def moving(point):
            # Only the ends and the middle move with the range.
            for place in places:
                point = tf.where(point == place, place, point)
            return point

        start, end = moving(start), moving(end)
        wide = end > start
        run = tf.where(wide, end - start, tf.ones_like(end))
        rise = self.function(end) - self.function(start)
        slope = tf.where(wide, rise / run, self.slope_at(start))
        return self._limited(slope)

    def _limited(self, slope: tf.Tensor) -> tf.Tensor:
        """The nearest slope that f can have."""
        most = self.largest_slope(slope.dtype)
        least = tf.zeros_like(most) if self.increasing else -most
        return tf.minimum(tf.maximum(slope, least), most)

    def _touching(self, searches) -> tf.Tensor:
        """Points where lines through an end of the range touch f."""
        signs, sides, ends, starts, stops = zip(*searches, strict=True)
        ends, starts, stops = map(tf.stack, (ends, starts, stops))
        shape = [-1] + [1] * (len(ends.shape) - 1)
        turn = tf.constant(np.multiply(signs, sides), ends.dtype)
        turn = tf.reshape(turn, shape)
        at_ends = self.function(ends)

        def is_steeper(z):
            tangent = self.slope_at(z) * (z - ends)
            return turn * (tangent - (self.function(z) - at_ends)) > 0

        left, right = _bisect(is_steeper, starts, stops)
        return 0.5 * (left + right)

    def _best_anchors(self, sign, interval: Interval, points, values):
        """Two points whose line above sign * f is lowest in the middle."""
        low, high = interval
        middle = _middle(interval)

        def steepest(run, rise, sign):
            """The point with the largest sign * slope, and that slope."""
            wide = run > 0
            slope = rise / tf.where(wide, run, tf.ones_like(run))
            rank = tf.where(wide, sign * slope, run.dtype.min)
            best = tf.argmax(rank, axis=0, output_type=tf.int32)
            one = tf.one_hot(best, points.shape[0], True, False, axis=0)
            return [
                tf.reduce_sum(tf.where(one, part, tf.zeros_like(part)), axis=0)
                for part in (points, slope)
            ]

        from_low, up = steepest(points - low, values - values[0], sign)
        to_high, down = steepest(high - points, values[1] - values, -sign)
        lines = [
            (middle, middle, self.slope_at(middle)),
            (low, from_low, up),
            (to_high, high, down),
        ]
        heights = [
            tf.reduce_max(
                sign * (values - self._limited(slope) * (points - middle)),
                axis=0,
            )
            for _, _, slope in lines
        ]
        # A slope between two near points is mostly rounding: only one that
        # is better by more than that replaces the tangent.
        noise = tf.reduce_max(tf.abs(values), axis=0)
        start, end, _ = lines[0]
        height = heights[0] - _ROUNDING * _epsilon(low) * noise
        for (left, right, _), other in zip(lines[1:], heights[1:], strict=True):
            start = tf.where(other < height, left, start)
            end = tf.where(other < height, right, end)
            height = tf.minimum(other, height)
        return start, end


def _middle(interval: Interval) -> tf.Tensor:
    return interval.low + 0.5 * (interval.high - interval.low)


def _epsilon(tensor: tf.Tensor) -> float:
    return float(np.finfo(tensor.dtype.as_numpy_dtype).eps)


def _inside(point: float, interval: Interval) -> tf.Tensor:
    """A number, or the end of the range that is nearest to it."""
    point = tf.cast(point, interval.low.dtype)
    return tf.minimum(tf.maximum(point, interval.low), interval.high)


def _bisect(goes_on, low: tf.Tensor, high: tf.Tensor):
    """Brackets of where `goes_on(z)` turns from true to false.

    It is true at the left end that is returned and false at the right one,
    unless they are the ends of the range. The middle is taken on a scale that
    is finer near 0, where activations bend.
    """

    def step(low, high, from_, to):
        middle = 0.5 * (from_ + to)
        z = tf.minimum(tf.maximum(tf.sinh(middle), low), high)
        right = goes_on(z)
        return (
            tf.where(right, z, low),
            tf.where(right, high, z),
            tf.where(right, middle, from_),
            tf.where(right, to, middle),
        )

    low, high, _, _ = tf.while_loop(
        lambda *_: True,
        step,
        (low, high, tf.asinh(low), tf.asinh(high)),
        maximum_iterations=_HALVINGS,
    )
    return low, high
