"""Linear relaxations: CROWN and COAP bounds for any norm.

Every activation is held between two lines over the range that its input can
reach, and a margin is bounded by substituting these lines backward, layer by
layer, until it is one linear function of the input. The largest value of that
over the ball is a dual norm.
"""

from __future__ import annotations

import copy

import tensorflow as tf

from keras_rub.bounds import maxima
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.lines import Interval, Lines
from keras_rub.bounds.program import (
    Affine,
    Bounded,
    Convex,
    Max,
    Operation,
    Program,
    pull_back,
)
from keras_rub.perturbations import PerturbationSet

KINDS = ("crown", "coap")

# Wider values are bounded by interval arithmetic instead of one backward
# substitution for each of their entries.
_WIDEST_SUBSTITUTION = 1024


class LinearRelaxation:
    """Linear bounds of one batch.

    Args:
        program: the network.
        x: tensor [batch, *features]. The clean inputs.
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`. Norm, mask, weights, valid range.
        kind: `"crown"` (the lower line of an unstable ReLU has slope 0 or 1)
            or `"coap"` (it is parallel to the upper one).
        training: bool. Whether a gradient will be taken. Ranges then come
            from substitution alone, which makes the gradient cheap; else
            they are also cut to what interval arithmetic gives. Both are
            sound; the margins differ a little, in either direction.
            Defaults to `False`.
        count: int. How many operations to look at; `margins` needs all of
            them. Defaults to `None`, all.
        memory_budget: int. Bytes that the rows of one sample's substitution
            may take, over all values that they pass; where they take more,
            interval arithmetic is used. Defaults to `None`, without limit.
    """

    def __init__(
        self,
        program: Program,
        x: tf.Tensor,
        rho: tf.Tensor,
        perturbations: PerturbationSet,
        kind: str = "crown",
        training: bool = False,
        count: int | None = None,
        memory_budget: int | None = None,
    ):
        self.training = training
        self.memory_budget = memory_budget
        self.program = program
        self.x = x
        self.rho = tf.broadcast_to(tf.cast(rho, x.dtype), tf.shape(x)[:1])
        self.perturbations = perturbations
        self.kind = kind
        self.lines: dict[int, Lines] = {}
        # Whether all lines come in parallel pairs: then one substitution
        # bounds a value from both sides.
        self.parallel = True
        self.intervals: dict[int, Interval] = {0: self._input_interval()}
        self.prefix = {operation.output for operation in program.prefix()}
        for operation in program.operations[:count]:
            self._bound_output(operation)

    def margins(self, competitors: Competitors) -> tf.Tensor:
        """Upper bounds [batch, K - 1] of the margins, by competitor."""
        rows = tf.cast(competitors.seeds, self.x.dtype)
        return self._substitute(self.program.output, rows)

    # Ranges of the values ----------------------------------------------------

    def _input_interval(self) -> Interval:
        shape = tuple(self.x.shape[1:])
        reach = self.rho[:, None] * tf.constant(
            self.perturbations.reach(shape)[None], self.x.dtype
        )
        reach = tf.reshape(reach, tf.shape(self.x))
        room = self.perturbations.room(self.x)
        up, down = (reach, reach) if room is None else room
        return Interval(
            self.x - tf.minimum(reach, down), self.x + tf.minimum(reach, up)
        )

    def _bound_output(self, operation: Operation) -> None:
        inputs = [self.intervals[index] for index in operation.inputs]
        if isinstance(operation, Affine):
            self.intervals[operation.output] = self._affine(operation, inputs)
            return
        # Only what an activation or a maximum reads needs a tight range.
        (source,) = operation.inputs
        interval = self._tighten(source)
        piecewise = (
            isinstance(operation, Convex)
            and operation.activation.rays is not None
        )
        if self.training and piecewise and source not in self.prefix:
            interval = self._differentiate(source, interval)
        self.intervals[source] = interval
        if isinstance(operation, Convex):
            function = operation.activation.function
            output = Interval(function(interval.low), function(interval.high))
            lines = convex_lines(operation, interval, self.kind)
            self.parallel &= self.kind == "coap" and piecewise
        elif isinstance(operation, Bounded):
            output = operation.activation.image(interval)
            lines = operation.activation.lines(interval)
            self.parallel = False
        elif isinstance(operation, Max):
            self.parallel = False
            output = Interval(
                maxima.largest(interval.low, operation.axes),
                maxima.largest(interval.high, operation.axes),
            )
            lines = max_lines(operation, interval)
        self.intervals[operation.output] = output
        self.lines[operation.output] = lines

    def _affine(self, operation: Affine, inputs) -> Interval:
        center = operation.apply(*((i.low + i.high) * 0.5 for i in inputs))
        radius = operation.magnitude(*((i.high - i.low) * 0.5 for i in inputs))
        return Interval(center - radius, center + radius)

    def _tighten(self, index: int) -> Interval:
        interval = self.intervals[index]
        width = _size(interval.low)
        if width > _WIDEST_SUBSTITUTION or not self._fits(width):
            if index in self.prefix:
                return self._tighten_first_layer(index)
            return interval
        eye = tf.eye(width, dtype=self.x.dtype)
        rows = tf.reshape(eye, [1, width, *interval.low.shape[1:]])
        low, high = (
            tf.reshape(end, tf.shape(interval.low))
            for end in self._both_sides(index, rows)
        )
        if self.training:
            return Interval(low, high)
        return Interval(
            tf.maximum(interval.low, low), tf.minimum(interval.high, high)
        )

    def _fits(self, rows: int) -> bool:
        """Whether so many rows may be substituted at once."""
        if self.memory_budget is None:
            return True
        total = sum(_size(known.low) for known in self.intervals.values())
        return rows * total * self.x.dtype.size <= self.memory_budget

    def _both_sides(self, index: int, rows: tf.Tensor) -> Interval:
        """Bounds [batch, R] of linear functions of one value."""
        if not self.parallel and index not in self.prefix:
            return Interval(
                -self._substitute(index, -rows), self._substitute(index, rows)
            )
        rows, (upper, lower) = self._to_input(index, rows)
        most = self._most(rows)
        limited = self.perturbations.input_range is not None
        # Without a valid range the set is symmetric.
        least = self._most(-rows) if limited else most
        return Interval(lower - least, upper + most)

    def _differentiate(self, index: int, tight: Interval) -> Interval:
        """The same range, with a gradient where it has an effect.

        The lines of a piecewise linear activation do not depend on a range
        that lies on one side of 0, and most do. So all ranges are found off
        the tape, and only those around 0 are found again on it.
        """
        if _size(tight.low) > _WIDEST_SUBSTITUTION:
            return tight  # a range by interval arithmetic, cheap as it is
        flat = Interval(
            *(
                tf.stop_gradient(tf.reshape(end, [-1, _size(end)]))
                for end in tight
            )
        )
        pairs = tf.where((flat.low <= 0) & (flat.high >= 0))
        shape = [-1, 1, *tight.low.shape[1:]]
        rows = tf.one_hot(pairs[:, 1], _size(tight.low), dtype=self.x.dtype)
        low, high = self._of_samples(pairs[:, 0])._both_sides(
            index, tf.reshape(rows, shape)
        )
        found = Interval(low[:, 0], high[:, 0])
        return Interval(
            *(
                tf.reshape(
                    tf.tensor_scatter_nd_update(known, pairs, new),
                    tf.shape(tight.low),
                )
                for known, new in zip(flat, found, strict=True)
            )
        )

    def _of_samples(self, samples: tf.Tensor) -> LinearRelaxation:
        """This relaxation for some of the samples, also repeated ones."""

        def chosen(parts):
            gathered = {}
            for part in parts:
                # Parallel lines share one slope; keep it so.
                if id(part) not in gathered:
                    gathered[id(part)] = tf.gather(part, samples)
            return type(parts)(*(gathered[id(part)] for part in parts))

        other = copy.copy(self)
        other.x = tf.gather(self.x, samples)
        other.rho = tf.gather(self.rho, samples)
        other.lines = {key: chosen(lines) for key, lines in self.lines.items()}
        other.intervals = {
            key: chosen(interval) for key, interval in self.intervals.items()
        }
        return other

    def _tighten_first_layer(self, index: int) -> Interval:
        """The range of a wide value that is affine in the input.

        How far it moves depends on the weights only, so its rows are
        substituted once for all samples, some at a time.
        """
        interval = self.intervals[index]
        width, shape = _size(interval.low), interval.low.shape[1:]
        chunk = _WIDEST_SUBSTITUTION

        def reach(first):
            entries = first + tf.range(chunk)
            rows = tf.one_hot(entries, width, dtype=self.x.dtype)
            rows, _ = self._to_input(
                index, tf.reshape(rows, [1, chunk, *shape])
            )
            flat = tf.reshape(rows, [1, chunk, _size(self.x)])
            return self.perturbations.support(flat, tuple(self.x.shape[1:]))[0]

        reached = tf.map_fn(
            reach,
            tf.range(0, width, chunk),
            fn_output_signature=tf.TensorSpec([chunk], self.x.dtype),
            parallel_iterations=1,
        )
        reached = tf.reshape(tf.reshape(reached, [-1])[:width], [1, *shape])
        values = {0: self.x}
        for operation in self.program.prefix():
            values[operation.output] = operation.apply(
                *(values[i] for i in operation.inputs)
            )
        rho = tf.reshape(self.rho, [-1] + [1] * len(shape))
        return Interval(
            tf.maximum(interval.low, values[index] - rho * reached),
            tf.minimum(interval.high, values[index] + rho * reached),
        )

    # Backward substitution ----------------------------------------------------

    def _substitute(self, target: int, rows: tf.Tensor) -> tf.Tensor:
        """Upper bounds of linear functions of one value.

        Args:
            target: number of the value.
            rows: tensor [batch or 1, R, ...], the functions.

        Returns:
            Tensor [batch, R].
        """
        rows, (upper, _) = self._to_input(target, rows)
        return upper + self._most(rows)

    def _to_input(self, target: int, rows: tf.Tensor):
        """The same functions in terms of how far the input moves.

        Returns:
            Rows [batch or 1, R, *features], and a pair of heights [batch, R]:
            the functions are at most the first plus the rows times the
            perturbation. They are at least the second plus the same, if all
            lines are parallel.
        """
        pending = {target: rows}
        heights = (tf.zeros([1, 1], self.x.dtype),) * 2
        for operation in reversed(self.program.operations):
            row = pending.pop(operation.output, None)
            if row is None:
                continue
            if isinstance(operation, Affine):
                parts, shifts = self._through_affine(operation, row)
            else:
                parts, shifts = self._through_lines(operation, row)
            heights = tuple(map(tf.add, heights, shifts))
            for index, part in zip(operation.inputs, parts, strict=True):
                known = pending.get(index)
                pending[index] = part if known is None else known + part
        if target == 0:
            shift = _inner(rows, self.x)
            heights = tuple(height + shift for height in heights)
        return pending[0], heights

    def _through_affine(self, operation: Affine, row: tf.Tensor):
        batch, count = tf.shape(row)[0], row.shape[1]
        flat = tf.reshape(row, tf.concat([[-1], tf.shape(row)[2:]], axis=0))
        shapes = [
            self.intervals[index].low.shape[1:] for index in operation.inputs
        ]
        parts = [
            tf.reshape(part, [batch, count, *shape])
            for part, shape in zip(
                pull_back(operation.apply, flat, shapes), shapes, strict=True
            )
        ]
        # The clean input counts as part of the height.
        size = tf.shape(self.x)[0] if 0 in operation.inputs else 1
        at_clean = operation.apply(
            *(
                self.x if index == 0 else tf.zeros([size, *shape], row.dtype)
                for index, shape in zip(operation.inputs, shapes, strict=True)
            )
        )
        shift = _inner(row, at_clean)
        return parts, (shift, shift)

    def _through_lines(self, operation: Operation, row: tf.Tensor):
        lines = self.lines[operation.output]
        positive = tf.nn.relu(row)
        # An upper line where the row is positive, a lower one elsewhere, and
        # the other way round for the lower bound.
        gap = _inner(positive, lines.upper_height - lines.lower_height)
        shifts = (
            gap + _inner(row, lines.lower_height),
            _inner(row, lines.upper_height) - gap,
        )
        if lines.lower_slope is lines.upper_slope:
            part = row * lines.upper_slope[:, None]
        else:
            negative = row - positive
            if isinstance(operation, Max):
                # Spread over the entries of which the maximum is taken.
                positive = maxima.spread(
                    positive, lines.lower_slope, operation.axes
                )
                negative = maxima.spread(
                    negative, lines.lower_slope, operation.axes
                )
            part = (
                positive * lines.upper_slope[:, None]
                + negative * lines.lower_slope[:, None]
            )
        if 0 in operation.inputs:
            shift = _inner(part, self.x)
            shifts = tuple(known + shift for known in shifts)
        return [part], shifts

    def _most(self, row: tf.Tensor) -> tf.Tensor:
        """Largest value [batch, R] of rows times a perturbation of the set."""
        size = _size(self.x)
        flat = tf.reshape(row, [tf.shape(row)[0], row.shape[1], size])
        rho = self.rho[:, None]
        limited = self.perturbations.input_range is not None
        bounds = []
        if not limited or self.perturbations.norm != "inf":
            steepest = self.perturbations.support(flat, tuple(self.x.shape[1:]))
            bounds.append(rho * steepest)
        if limited:
            # The box that the valid range and the largest moves leave.
            box, x = self.intervals[0], self.x
            high = tf.reshape(box.high - x, [-1, size, 1])
            low = tf.reshape(x - box.low, [-1, size, 1])
            moved = tf.matmul(tf.nn.relu(flat), high) + tf.matmul(
                tf.nn.relu(-flat), low
            )
            bounds.append(moved[..., 0])
        return bounds[0] if len(bounds) == 1 else tf.minimum(*bounds)


def convex_lines(operation: Convex, interval: Interval, kind: str) -> Lines:
    """Lines above and below a convex activation over a range.

    Args:
        operation: the activation.
        interval: the range of its input.
        kind: `"crown"` or `"coap"`.
    """
    activation = operation.activation
    low, high = interval
    at_low, at_high = activation.function(low), activation.function(high)
    wide = high - low > 1e-12
    slope = tf.where(
        wide,
        (at_high - at_low) / tf.where(wide, high - low, 1.0),
        activation.derivative(high),
    )
    if activation.rays is not None:
        slope = tf.clip_by_value(slope, *activation.rays)
    # Through the end that gives the higher line: rounding can't cut f off.
    height = tf.maximum(at_low - slope * low, at_high - slope * high)
    if activation.rays is None:
        parameter = (low + high) * 0.5
    elif kind == "coap":
        parameter = slope
    else:
        left, right = (tf.cast(ray, low.dtype) for ray in activation.rays)
        parameter = tf.where(high > -low, right, left)
    lower_slope, lower_height = activation.line(parameter)
    if lower_height is None:
        lower_height = tf.zeros_like(lower_slope)
    return Lines(slope, height, lower_slope, lower_height)


def max_lines(operation: Max, interval: Interval) -> Lines:
    """Lines of a maximum: exact where one entry always wins.

    The slopes have the axes of the entries, the heights do not.
    """
    axes = operation.axes
    low, high = interval
    winner = maxima.first_largest(low, axes)
    lowest = maxima.largest(low, axes)
    others = maxima.largest(
        tf.where(winner > 0, tf.cast(high.dtype.min, high.dtype), high), axes
    )
    decided = lowest >= others
    highest = maxima.largest(high, axes)
    decided_row = tf.cast(maxima.spread(decided, low, axes), low.dtype)
    return Lines(
        winner * decided_row,
        tf.where(decided, tf.zeros_like(highest), highest),
        winner,
        tf.zeros_like(highest),
    )


def _inner(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """[batch or 1, R, ...] times [batch or 1, ...] -> [batch or 1, R]."""
    size = _size(values)
    flat = tf.reshape(rows, [tf.shape(rows)[0], rows.shape[1], size])
    if rows.shape[1] == 1:
        # Many products of two vectors are slow as products of matrices.
        values = tf.reshape(values, [-1, 1, size])
        return tf.reduce_sum(flat * values, axis=-1)
    return tf.matmul(flat, tf.reshape(values, [-1, size, 1]))[..., 0]


def _size(tensor: tf.Tensor) -> int:
    return tf.TensorShape(tensor.shape[1:]).num_elements()
