"""Linear relaxations: CROWN and COAP bounds for any norm.

Every activation is held between two lines over the range that its input can
reach, and a margin is bounded by substituting these lines backward, layer by
layer, until it is one linear function of the input. The largest value of that
over the ball is a dual norm. The ranges come from the same substitution, or
from interval arithmetic alone ("CROWN-IBP").
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_rub.bounds import intervals, local, maxima
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.intervals import Ball, size_of
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
RANGES = ("linear", "interval")

# Tensors as large as the rows that are alive together in a substitution.
_COPIES = 4

# Rows that are substituted together take no more bytes than this: beyond what
# a processor keeps at hand, each of them only gets slower.
_CHUNK = 2**22

# Up to so many entries, all are substituted; of wider values only those that
# matter.
_NARROW = 512

# Entries of a maximum whose lower ends differ by less, relative to its range,
# are equally good.
_TIED = 1e-5


class _Walk(NamedTuple):
    """How far a backward substitution has come.

    `number` operations are behind it, counted from the last; `pending` holds
    the rows of the values that it has reached, `heights` the constants.
    """

    number: int
    pending: dict[int, tf.Tensor]
    heights: tuple[tf.Tensor, ...]


class LinearRelaxation:
    """Linear bounds of one batch.

    The range of a value that is affine in the input is exact. Behind that,
    each neuron whose range matters costs one backward substitution. A ReLU
    whose input stays on one side of 0 is linear whatever the range is, so
    where a value is too wide to substitute at once, only the neurons that
    interval arithmetic leaves open are.

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
        ranges: `"linear"` or `"interval"`. Whether ranges come from
            substitution or from interval arithmetic. Defaults to
            `"linear"`.
        widest: int. Values with more entries than this get interval ranges.
            Defaults to `None`, none of them.
        memory_budget: int. Bytes that rows may take, over all values that
            they pass. Defaults to `None`, without limit.
        chunked: bool. What happens to rows that take more: they are
            substituted some at a time, or not at all, and the range is an
            interval. Defaults to `False`, an interval, which a gradient can
            pass cheaply.
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
        *,
        ranges: str = "linear",
        widest: int | None = None,
        memory_budget: int | None = None,
        chunked: bool = False,
    ):
        self.training = training
        self.ranges = ranges
        self.widest = widest
        self.memory_budget = memory_budget
        self.chunked = chunked
        self.program = program
        self.x = x
        self.ball = Ball(x, rho, perturbations)
        self.kind = kind
        self.lines: dict[int, Lines] = {}
        # Whether all lines come in parallel pairs: then one substitution
        # bounds a value from both sides.
        self.parallel = True
        self.intervals: dict[int, Interval] = {0: self.ball.box}
        self.shapes: dict[int, Sequence[int]] = {0: self.ball.shape}
        self.prefix = {operation.output for operation in program.prefix()}
        for operation in program.operations[:count]:
            self._bound_output(operation)
            found = self.intervals[operation.output]
            self.shapes[operation.output] = found.low.shape[1:]

    @classmethod
    def of_lines(
        cls,
        program: Program,
        x: tf.Tensor,
        rho: tf.Tensor,
        perturbations: PerturbationSet,
        lines: Mapping[int, Lines],
        shapes: Mapping[int, Sequence[int]],
    ) -> LinearRelaxation:
        """A relaxation whose lines are known already; see `margins`.

        Args:
            program: as of the class, like `x`, `rho` and `perturbations`.
            x: tensor [batch, *features].
            rho: tensor [] or [batch].
            perturbations: `PerturbationSet`.
            lines: dict from the output of each operation that is not affine
                to lines [batch, ...] that hold it over its range.
            shapes: the shapes of all values, without the batch.
        """
        relaxation = cls(program, x, rho, perturbations, count=0)
        relaxation.lines = dict(lines)
        relaxation.shapes = dict(shapes)
        return relaxation

    def margins(self, competitors: Competitors) -> tf.Tensor:
        """Upper bounds [batch, C] of the margins, by competitor."""
        rows = tf.cast(competitors.seeds, self.x.dtype)

        def bound(some, samples):
            seeds = tf.gather(rows, samples)
            return (some._substitute(self.program.output, seeds),)

        count = rows.shape[1]
        size = count * self._row_bytes()
        return self._over_samples(bound, [[count]], size)[0]

    # Ranges of the values ----------------------------------------------------

    def _bound_output(self, operation: Operation) -> None:
        inputs = [self.intervals[index] for index in operation.inputs]
        if isinstance(operation, Affine):
            self.intervals[operation.output] = intervals.image(
                operation, inputs
            )
            return
        # Only what an activation or a maximum reads needs a tight range.
        (source,) = operation.inputs
        piecewise = (
            isinstance(operation, Convex)
            and operation.activation.rays is not None
        )
        interval = self._tighten(source, piecewise)
        self.intervals[source] = interval
        self.intervals[operation.output] = intervals.image(
            operation, [interval]
        )
        if isinstance(operation, Convex):
            lines = convex_lines(operation, interval, self.kind)
            self.parallel &= self.kind == "coap" and piecewise
        elif isinstance(operation, Bounded):
            lines = operation.activation.lines(interval)
            self.parallel = False
        elif isinstance(operation, Max):
            lines = max_lines(operation, interval)
            self.parallel = False
        self.lines[operation.output] = lines

    def _tighten(self, index: int, piecewise: bool) -> Interval:
        """The best range of a value that an activation or a maximum reads.

        Args:
            index: number of the value.
            piecewise: whether a range that does not hold 0 has no effect.
        """
        if index == 0:
            return self.intervals[0]
        if index in self.prefix:
            return intervals.affine_range(self.program, index, self.ball)
        interval = self.intervals[index]
        width, shape = size_of(interval.low), interval.low.shape[1:]
        if self.ranges == "interval" or (
            self.widest is not None and width > self.widest
        ):
            return interval
        if not self.training and self._is_moved_activation(index):
            return interval
        fits = self._fits(width)
        if not fits and not self.chunked:
            return interval
        if self.chunked:
            windows = local.Windows.of(self.program, index, self.shapes)
            if windows is not None and self._fits_alone(windows):
                return _cut(self._tighten_windows(windows), interval)
        if self.chunked and piecewise and (width > _NARROW or not fits):
            low, high = (tf.reshape(end, [-1, width]) for end in interval)
            open_ = tf.where((low < 0) & (high > 0))
            return self._tighten_pairs(index, open_)
        if not fits:
            everything = tf.ones([tf.shape(self.x)[0], width])
            return self._tighten_pairs(index, tf.where(everything))
        eye = tf.eye(width, dtype=self.x.dtype)
        rows = tf.reshape(eye, [1, width, *shape])

        def bound(some, samples):
            del samples
            return some._both_sides(index, rows)

        size = width * self._row_bytes()
        ends = self._over_samples(bound, [[width], [width]], size)
        found = Interval(
            *(tf.reshape(end, tf.shape(interval.low)) for end in ends)
        )
        if not self.training:
            return _cut(found, interval)
        return self._differentiate(index, found) if piecewise else found

    def _is_moved_activation(self, index: int) -> bool:
        """Whether each entry is that of an activation, at most scaled.

        The range of the activation is then as good as any line over the
        same input.
        """
        makers = {op.output: op for op in self.program.operations}
        operation = makers.get(index)
        while isinstance(operation, Affine) and operation.monomial:
            if len(operation.inputs) != 1:
                return False
            operation = makers.get(operation.inputs[0])
        return isinstance(operation, (Convex, Bounded))

    def _channel_bytes(self, windows: local.Windows) -> int:
        """What the rows of one channel of one sample take."""
        return windows.positions * windows.row_size * self.x.dtype.size

    def _fits_alone(self, windows: local.Windows) -> bool:
        needed = _COPIES * self._channel_bytes(windows)
        return self.memory_budget is None or needed <= self.memory_budget

    def _tighten_windows(self, windows: local.Windows) -> Interval:
        """Substitutes for all entries of a value, on windows."""
        channel = self._channel_bytes(windows)
        together = windows.channels
        if self.memory_budget is not None:
            # Each group of channels makes the graph longer, so few of them.
            fitting = self.memory_budget // (_COPIES * channel)
            together = min(together, fitting)
        shape = [*windows.grid, windows.channels]

        def bound(some, samples):
            del samples
            return windows.range(some.ball, some.lines, together)

        return Interval(
            *self._over_samples(bound, [shape, shape], together * channel)
        )

    def _row_bytes(self) -> int:
        """About what one row of one sample takes on its way."""
        total = sum(size_of(known.low) for known in self.intervals.values())
        return total * self.x.dtype.size

    def _fits(self, rows: int) -> bool:
        """Whether so many rows of one sample may be substituted at once."""
        if self.memory_budget is None:
            return True
        return rows * self._row_bytes() <= self.memory_budget

    def _together(self, size: int) -> int:
        """How often so many bytes fit into the budget, at least once."""
        limit = _CHUNK
        if self.memory_budget is not None:
            limit = min(limit, self.memory_budget // _COPIES)
        return max(1, limit // size)

    def _over_samples(
        self,
        function: Callable[[LinearRelaxation, tf.Tensor], tuple],
        shapes: list[list[int]],
        size: int,
    ) -> list[tf.Tensor]:
        """`function` of as many samples at a time as fit into the budget.

        Args:
            function: of a relaxation of some samples and their numbers [n],
                to a tuple of tensors [n, ...].
            shapes: the shapes of these tensors, without the batch.
            size: int. How many bytes a sample its rows take.

        Returns:
            The tensors [batch, ...] of all samples.
        """
        batch = tf.shape(self.x)[0]
        if not self.chunked:
            return list(function(self, tf.range(batch)))
        together = self._together(size)

        def step(first, parts):
            last = tf.minimum(first + together, batch)
            samples = tf.range(first, last)
            found = function(self.of_samples(samples), samples)
            return last, [
                part.write(part.size(), value)
                for part, value in zip(parts, found, strict=True)
            ]

        return self._collect(step, batch, shapes)

    def _collect(self, step, total, shapes) -> list[tf.Tensor]:
        """Runs a step from the first number to the last, and joins."""
        dtype = self.x.dtype
        parts = []
        for shape in shapes:
            part = tf.TensorArray(
                dtype, size=0, dynamic_size=True, infer_shape=False
            )
            # A part with no rows, so that there is always one.
            parts.append(part.write(0, tf.zeros([0, *shape], dtype)))
        _, parts = tf.while_loop(
            lambda first, parts: first < total,
            step,
            (tf.zeros_like(total), parts),
            parallel_iterations=1,
        )
        return [
            tf.ensure_shape(part.concat(), [None, *shape])
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _tighten_pairs(self, index: int, pairs: tf.Tensor) -> Interval:
        """Substitutes for some entries [n, 2] of a value, in order.

        The rows of one sample share its lines, so one sample is looked at
        after the other.
        """
        interval = self.intervals[index]
        width, shape = size_of(interval.low), interval.low.shape[1:]
        together = self._together(self._row_bytes())
        batch = tf.shape(self.x, out_type=tf.int64)[0]
        counts = tf.math.bincount(
            pairs[:, 0], minlength=batch, maxlength=batch, dtype=tf.int64
        )
        ends = tf.cumsum(counts)

        def step(first, parts):
            sample = pairs[first, 0]
            last = tf.minimum(first + together, ends[sample])
            rows = tf.one_hot(pairs[first:last, 1], width, dtype=self.x.dtype)
            some = self.of_samples(sample[None])
            found = some._both_sides(index, tf.reshape(rows, [1, -1, *shape]))
            return last, [
                part.write(part.size(), value[0])
                for part, value in zip(parts, found, strict=True)
            ]

        total = tf.shape(pairs, out_type=tf.int64)[0]
        found = self._collect(step, total, [[], []])
        known = [tf.reshape(end, [-1, width]) for end in interval]
        return _cut(
            Interval(
                *(
                    tf.reshape(
                        tf.tensor_scatter_nd_update(old, pairs, new),
                        tf.shape(interval.low),
                    )
                    for old, new in zip(known, found, strict=True)
                )
            ),
            interval,
        )

    def _both_sides(self, index: int, rows: tf.Tensor) -> Interval:
        """Bounds [batch, R] of linear functions of one value."""
        if not self.parallel:
            # Up to the first lines both sides have the same rows.
            above = self._walk(
                _Walk(0, {index: rows}, self._no_heights()), pause=True
            )
            below = _Walk(
                above.number,
                {key: -row for key, row in above.pending.items()},
                tuple(-height for height in above.heights),
            )
            low, high = map(self._walk, (below, above))
            return Interval(
                -(low.heights[0] + self.ball.most(low.pending[0])),
                high.heights[0] + self.ball.most(high.pending[0]),
            )
        rows, (upper, lower) = self._to_input(index, rows)
        most = self.ball.most(rows)
        # Without a valid range the set is symmetric.
        least = self.ball.most(-rows) if self.ball.limited else most
        return Interval(lower - least, upper + most)

    def _differentiate(self, index: int, tight: Interval) -> Interval:
        """The same range, with a gradient where it has an effect.

        The lines of a piecewise linear activation do not depend on a range
        that lies on one side of 0, and most do. So all ranges are found off
        the tape, and only those around 0 are found again on it.
        """
        flat = Interval(
            *(
                tf.stop_gradient(tf.reshape(end, [-1, size_of(end)]))
                for end in tight
            )
        )
        pairs = tf.where((flat.low <= 0) & (flat.high >= 0))
        shape = [-1, 1, *tight.low.shape[1:]]
        rows = tf.one_hot(pairs[:, 1], size_of(tight.low), dtype=self.x.dtype)
        low, high = self.of_samples(pairs[:, 0])._both_sides(
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

    def of_samples(self, samples: tf.Tensor) -> LinearRelaxation:
        """This relaxation for some of the samples, also repeated ones."""

        def chosen(parts):
            gathered = {}
            for part in parts:
                # Parallel lines share one slope; keep it so.
                if id(part) not in gathered:
                    gathered[id(part)] = tf.gather(part, samples)
            return type(parts)(*(gathered[id(part)] for part in parts))

        other = copy.copy(self)
        other.ball = self.ball.take(samples)
        other.x = other.ball.x
        other.lines = {key: chosen(lines) for key, lines in self.lines.items()}
        return other

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
        return upper + self.ball.most(rows)

    def _to_input(self, target: int, rows: tf.Tensor):
        """The same functions in terms of how far the input moves.

        Returns:
            Rows [batch or 1, R, *features], and a pair of heights [batch, R]:
            the functions are at most the first plus the rows times the
            perturbation. They are at least the second plus the same, if all
            lines are parallel.
        """
        found = self._walk(_Walk(0, {target: rows}, self._no_heights()))
        heights = found.heights
        if target == 0:
            shift = _inner(rows, self.x)
            heights = tuple(height + shift for height in heights)
        return found.pending[0], heights

    def _no_heights(self):
        return (tf.zeros([1, 1], self.x.dtype),) * 2

    def _walk(self, walk: _Walk, pause: bool = False) -> _Walk:
        """Goes on backward, to the input or up to the first lines."""
        pending, heights = dict(walk.pending), walk.heights
        operations = self.program.operations[::-1]
        for number in range(walk.number, len(operations)):
            operation = operations[number]
            if operation.output not in pending:
                continue
            if isinstance(operation, Affine):
                row = pending.pop(operation.output)
                parts, shifts = self._through_affine(operation, row)
            elif pause:
                return _Walk(number, pending, heights)
            else:
                row = pending.pop(operation.output)
                parts, shifts = self._through_lines(operation, row)
            heights = tuple(map(tf.add, heights, shifts))
            for index, part in zip(operation.inputs, parts, strict=True):
                known = pending.get(index)
                pending[index] = part if known is None else known + part
        return _Walk(len(operations), pending, heights)

    def _through_affine(self, operation: Affine, row: tf.Tensor):
        batch, count = tf.shape(row)[0], _count(row)
        flat = tf.reshape(row, tf.concat([[-1], tf.shape(row)[2:]], axis=0))
        shapes = [self.shapes[index] for index in operation.inputs]
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
    lowest, highest = (maxima.largest(end, axes) for end in interval)
    # Every entry is a lower line. Large balls make many of them equally good
    # (windows that see the same weights): the first, so that rounding, which
    # depends on the size of a batch, doesn't choose.
    tied = lowest - _TIED * tf.maximum(tf.abs(lowest), tf.abs(highest))
    winner = maxima.first_largest(
        tf.cast(low >= maxima.spread(tied, low, axes), low.dtype), axes
    )
    others = maxima.largest(
        tf.where(winner > 0, tf.cast(high.dtype.min, high.dtype), high), axes
    )
    decided = maxima.total(low * winner, axes) >= others
    decided_row = tf.cast(maxima.spread(decided, low, axes), low.dtype)
    return Lines(
        winner * decided_row,
        tf.where(decided, tf.zeros_like(highest), highest),
        winner,
        tf.zeros_like(highest),
    )


def _cut(one: Interval, other: Interval) -> Interval:
    """What two ranges of the same value have in common."""
    return Interval(
        tf.maximum(one.low, other.low), tf.minimum(one.high, other.high)
    )


def _count(rows: tf.Tensor) -> int | tf.Tensor:
    """How many rows [n, R, ...] there are."""
    return tf.shape(rows)[1] if rows.shape[1] is None else rows.shape[1]


def _inner(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """[batch or 1, R, ...] times [batch or 1, ...] -> [batch or 1, R]."""
    size = size_of(values)
    flat = tf.reshape(rows, [tf.shape(rows)[0], _count(rows), size])
    if rows.shape[1] == 1:
        # Many products of two vectors are slow as products of matrices.
        values = tf.reshape(values, [-1, 1, size])
        return tf.reduce_sum(flat * values, axis=-1)
    return tf.matmul(flat, tf.reshape(values, [-1, size, 1]))[..., 0]
