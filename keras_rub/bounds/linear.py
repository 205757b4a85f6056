"""Linear relaxations: CROWN and COAP bounds for any norm.

Every activation is held between two lines over the range that its input can
reach, and a margin is bounded by substituting these lines backward, layer by
layer, until it is one linear function of the input. The largest value of that
over the ball is a dual norm.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from keras_rub.bounds.majorant import Classes, first_maximum
from keras_rub.bounds.program import Affine, Convex, Operation, Program
from keras_rub.uncertainty import PerturbationSet

KINDS = ("crown", "coap")

# Wider values are bounded by interval arithmetic instead of one backward
# substitution for each of their entries.
_WIDEST_SUBSTITUTION = 1024


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


class LinearRelaxation:
    """Linear bounds of one batch.

    Args:
        program: the network.
        x: tensor [batch, *features]. The clean inputs.
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`. Norm, mask, weights, valid range.
        kind: `"crown"` (the lower line of an unstable ReLU has slope 0 or 1)
            or `"coap"` (it is parallel to the upper one).
    """

    def __init__(
        self,
        program: Program,
        x: tf.Tensor,
        rho: tf.Tensor,
        perturbations: PerturbationSet,
        kind: str = "crown",
    ):
        self.program = program
        self.x = x
        self.rho = tf.broadcast_to(tf.cast(rho, x.dtype), tf.shape(x)[:1])
        self.perturbations = perturbations
        self.kind = kind
        self.lines: dict[int, Lines] = {}
        self.intervals: dict[int, Interval] = {0: self._input_interval()}
        self.prefix = {operation.output for operation in program.prefix()}
        for operation in program.operations:
            self._bound_output(operation)

    def margins(self, classes: Classes) -> tf.Tensor:
        """Upper bounds [batch, K - 1] of the margins, by competitor."""
        rows = tf.cast(classes.seeds, self.x.dtype)
        return self._substitute(self.program.output, rows)

    # Ranges of the values ----------------------------------------------------

    def _input_interval(self) -> Interval:
        shape = tuple(self.x.shape[1:])
        reach = self.rho[:, None] * self.perturbations.scale_gradient(
            tf.ones([1, _size(self.x)], self.x.dtype), shape
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
        self.intervals[source] = interval
        if isinstance(operation, Convex):
            function = operation.activation.function
            output = Interval(function(interval.low), function(interval.high))
            lines = convex_lines(operation, interval, self.kind)
        else:
            output = Interval(
                tf.reduce_max(interval.low, axis=operation.axis),
                tf.reduce_max(interval.high, axis=operation.axis),
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
        if width > _WIDEST_SUBSTITUTION:
            if index in self.prefix:
                return self._tighten_first_layer(index)
            return interval
        eye = tf.eye(width, dtype=self.x.dtype)
        shape = [1, 2 * width, *interval.low.shape[1:]]
        rows = tf.reshape(tf.concat([eye, -eye], axis=0), shape)
        if index not in self.prefix:
            rows = tf.repeat(rows, tf.shape(self.x)[0], axis=0)
        found = self._substitute(index, rows)
        high, low = tf.split(found, 2, axis=1)
        shape = tf.shape(interval.low)
        return Interval(
            tf.maximum(interval.low, tf.reshape(-low, shape)),
            tf.minimum(interval.high, tf.reshape(high, shape)),
        )

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
            return self.perturbations.dual_norm(
                self.perturbations.scale_gradient(flat, tuple(self.x.shape[1:]))
            )[0]

        reached = tf.map_fn(
            reach,
            tf.range(0, width, chunk),
            fn_output_signature=tf.TensorSpec([chunk], self.x.dtype),
            parallel_iterations=1,
        )
        reached = tf.reshape(tf.reshape(reached, [-1])[:width], [1, *shape])
        values = {0: self.x}
        for operation in self.program.operations:
            if operation.output in self.prefix:
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
        rows, constant = self._to_input(target, rows)
        return constant + self._maximise(rows)

    def _to_input(self, target: int, rows: tf.Tensor):
        """The same functions as rows [batch or 1, R, *features] and heights."""
        pending = {target: rows}
        constant = tf.zeros([1, 1], self.x.dtype)
        for operation in reversed(self.program.operations):
            row = pending.pop(operation.output, None)
            if row is None:
                continue
            if isinstance(operation, Affine):
                parts, shift = self._through_affine(operation, row)
            else:
                parts, shift = self._through_lines(operation, row)
            constant += shift
            for index, part in zip(operation.inputs, parts, strict=True):
                known = pending.get(index)
                pending[index] = part if known is None else known + part
        return pending[0], constant

    def _through_affine(self, operation: Affine, row: tf.Tensor):
        batch, count = tf.shape(row)[0], row.shape[1]
        flat = tf.reshape(row, tf.concat([[-1], tf.shape(row)[2:]], axis=0))
        zeros = [
            tf.zeros(
                [tf.shape(flat)[0], *self.intervals[index].low.shape[1:]],
                row.dtype,
            )
            for index in operation.inputs
        ]
        with tf.GradientTape() as tape:
            tape.watch(zeros)
            output = operation.apply(*zeros)
        parts = tape.gradient(
            output,
            zeros,
            output_gradients=flat,
            unconnected_gradients="zero",
        )
        parts = [
            tf.reshape(part, [batch, count, *part.shape[1:]]) for part in parts
        ]
        bias = operation.apply(*(part[:1] for part in zeros))
        return parts, _inner(row, bias[:, None])

    def _through_lines(self, operation: Operation, row: tf.Tensor):
        lines = self.lines[operation.output]
        positive, negative = tf.nn.relu(row), -tf.nn.relu(-row)
        constant = _inner(positive, lines.upper_height[:, None]) + _inner(
            negative, lines.lower_height[:, None]
        )
        if not isinstance(operation, Convex):
            # Spread over the entries of which the maximum is taken.
            positive = tf.expand_dims(positive, operation.axis)
            negative = tf.expand_dims(negative, operation.axis)
        part = (
            positive * lines.upper_slope[:, None]
            + negative * lines.lower_slope[:, None]
        )
        return [part], constant

    def _maximise(self, row: tf.Tensor) -> tf.Tensor:
        """Largest value of linear functions of the input over the set."""
        size = _size(self.x)
        flat = tf.reshape(row, [tf.shape(row)[0], row.shape[1], size])
        x = tf.reshape(self.x, [-1, 1, size])
        shape = tuple(self.x.shape[1:])
        rho = self.rho[:, None]
        at_clean = _matvec(flat, self.x)
        steepest = self.perturbations.dual_norm(
            self.perturbations.scale_gradient(flat, shape)
        )
        best = rho * steepest
        if self.perturbations.input_range is not None or (
            self.perturbations.norm == "inf"
        ):
            # The box that the valid range and the largest moves leave.
            box = self.intervals[0]
            high = tf.reshape(box.high, tf.shape(x)) - x
            low = x - tf.reshape(box.low, tf.shape(x))
            moved = tf.matmul(
                tf.nn.relu(flat), high, transpose_b=True
            ) + tf.matmul(tf.nn.relu(-flat), low, transpose_b=True)
            best = tf.minimum(best, moved[..., 0])
        return at_clean + best


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
        left, right = activation.rays
        parameter = tf.where(high > -low, right, left) * tf.ones_like(low)
        parameter = tf.cast(parameter, low.dtype)
    lower_slope, lower_height = activation.line(parameter)
    if lower_height is None:
        lower_height = tf.zeros_like(lower_slope)
    return Lines(slope, height, lower_slope, lower_height)


def max_lines(operation: Operation, interval: Interval) -> Lines:
    """Lines of a maximum: exact where one entry always wins.

    The slopes have the axis of the entries, the heights do not.
    """
    axis = operation.axis
    low, high = interval
    winner = first_maximum(low, axis)
    lowest = tf.reduce_max(low, axis=axis)
    others = tf.reduce_max(
        tf.where(winner > 0, tf.cast(high.dtype.min, high.dtype), high),
        axis=axis,
    )
    decided = lowest >= others
    highest = tf.reduce_max(high, axis=axis)
    decided_row = tf.cast(tf.expand_dims(decided, axis), low.dtype)
    return Lines(
        winner * decided_row,
        tf.where(decided, tf.zeros_like(highest), highest),
        winner,
        tf.zeros_like(highest),
    )


def _inner(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Sum over all but the first two axes of [b, R, ...] * [b, 1, ...]."""
    axes = list(range(2, len(rows.shape)))
    return tf.reduce_sum(rows * values, axis=axes)


def _matvec(rows: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """[batch or 1, R, M] times [batch, ...] -> [batch, R]."""
    size = rows.shape[-1]
    x = tf.reshape(x, [-1, size, 1])
    return tf.matmul(rows, x)[..., 0]


def _size(tensor: tf.Tensor) -> int:
    return tf.TensorShape(tensor.shape[1:]).num_elements()
