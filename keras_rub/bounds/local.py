"""Backward substitution where a neuron reads only a window of each value.

A neuron behind convolutions depends on a small window of the values before it,
which grows backward with every convolution. The rows of all neurons of one
position have their windows in the same place, so that they are substituted as
small tensors, and never as functions of whole values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_rub.bounds.intervals import Ball
from keras_rub.bounds.lines import Interval, Lines
from keras_rub.bounds.program import Affine, Max, Operation, Program
from keras_rub.perturbations import PerturbationSet

# Windows must be smaller than the values themselves, by this much, to be worth
# the cutting.
_WORTH = 0.5


@dataclasses.dataclass(frozen=True)
class _Axis:
    """What positions read along one axis of a value.

    Position p reads `size` entries from `p * step + first` on. Those in
    [0, length) exist.
    """

    first: int
    size: int
    step: int
    length: int

    def before(self, window: int, stride: int, pad: int, length: int) -> _Axis:
        """What they read of the value before a convolution."""
        return _Axis(
            self.first * stride - pad,
            (self.size - 1) * stride + window,
            self.step * stride,
            length,
        )

    def indices(self, positions: int) -> np.ndarray:
        """[positions, size], where the value stands between two zeros."""
        start = np.arange(positions)[:, None] * self.step + self.first
        found = start + np.arange(self.size)
        return np.clip(found, -1, self.length) + 1


class Windows:
    """The windows of one value's neurons, back to the input.

    Args:
        path: the operations from the input to the value, each of which reads
            the one before.
        shapes: the shapes of all values, without the batch.
    """

    def __init__(
        self, path: Sequence[Operation], shapes: Mapping[int, Sequence[int]]
    ):
        self.path = path
        self.shapes = {
            index: tuple(shapes[index])
            for index in (0, *(op.output for op in path))
        }
        self.target = path[-1].output
        *self.grid, self.channels = self.shapes[self.target]
        self.axes: dict[int, list[_Axis]] = {
            self.target: [_Axis(0, 1, 1, length) for length in self.grid]
        }
        for operation in reversed(path):
            (source,) = operation.inputs
            axes = self.axes[operation.output]
            layer = None
            if isinstance(operation, Affine):
                layer = operation.convolution
            if layer is not None:
                axes = [
                    axis.before(
                        layer.kernel_size[i],
                        layer.strides[i],
                        self._padding(layer, operation, i),
                        self.shapes[source][i],
                    )
                    for i, axis in enumerate(axes)
                ]
            self.axes[source] = axes

    @classmethod
    def of(
        cls,
        program: Program,
        target: int,
        shapes: Mapping[int, Sequence[int]],
    ) -> Windows | None:
        """The windows of a value, or `None` where there are none that pay."""
        makers = {
            operation.output: operation for operation in program.operations
        }
        path: list[Operation] = []
        value = target
        while value:
            operation = makers[value]
            if len(operation.inputs) != 1 or not _is_local(operation):
                return None
            path.append(operation)
            (value,) = operation.inputs
        if not any(getattr(op, "convolution", None) for op in path):
            return None
        found = cls(path[::-1], shapes)
        return found if found._pays() else None

    @property
    def row_size(self) -> int:
        """Entries of the largest window."""
        return max(map(self._entries, self.axes))

    @property
    def positions(self) -> int:
        """How many positions the value has."""
        return int(np.prod(self.grid))

    def range(
        self, ball: Ball, lines: Mapping[int, Lines], together: int
    ) -> Interval:
        """Bounds [batch, *grid, channels] of the value.

        Args:
            ball: the perturbation sets.
            lines: what holds each activation of the path.
            together: int. How many channels to look at at once.
        """
        parts = []
        for first in range(0, self.channels, together):
            rows = tf.eye(self.channels, dtype=ball.x.dtype)
            rows = rows[first : first + together]
            most = self._most(rows, ball, lines)
            parts.append(Interval(-self._most(-rows, ball, lines), most))
        shape = [-1, *self.grid, self.channels]
        low, high = (
            tf.reshape(tf.concat(ends, axis=-1), shape)
            for ends in zip(*parts, strict=True)
        )
        return Interval(low, high)

    def _most(self, rows, ball: Ball, lines) -> tf.Tensor:
        """Upper bounds [batch, positions, R] of rows [R, channels]."""
        # From here on [batch or 1, positions or 1, R, entries of a window].
        rows = rows[None, None]
        total = tf.zeros([1, 1, 1], rows.dtype)
        for operation in reversed(self.path):
            (source,) = operation.inputs
            if isinstance(operation, Affine):
                rows, height = self._through_affine(operation, rows)
                if source:
                    rows *= self._inside(source, rows.dtype)
            else:
                rows, height = self._through_lines(
                    operation, rows, lines[operation.output]
                )
            total += height
        total += _inner(rows, self._cut(0, ball.x))
        return total + self._farthest(rows, ball)

    def _through_lines(self, operation, rows, lines: Lines):
        (source,) = operation.inputs
        above, height, below, depth = (
            self._cut(source, part)
            for part in (
                lines.upper_slope,
                lines.upper_height,
                lines.lower_slope,
                lines.lower_height,
            )
        )
        positive = tf.nn.relu(rows)
        negative = rows - positive
        height = _inner(positive, height) + _inner(negative, depth)
        return positive * above[:, :, None] + negative * below[
            :, :, None
        ], height

    def _through_affine(self, operation: Affine, rows):
        source, target = operation.inputs[0], operation.output
        dtype = rows.dtype
        zeros = tf.zeros([1, *self.shapes[source]], dtype)
        at_zero = operation.apply(zeros)
        height = _inner(rows, self._cut(target, at_zero))
        layer = operation.convolution
        if layer is None:
            gain = operation.apply(tf.ones_like(zeros)) - at_zero
            return rows * self._cut(source, gain)[:, :, None], height
        shape = tf.shape(rows)[:3]
        sizes = [axis.size for axis in self.axes[target]]
        flat = tf.reshape(rows, [-1, *sizes, self.shapes[target][-1]])
        sizes = [axis.size for axis in self.axes[source]]
        output = [tf.shape(flat)[0], *sizes, self.shapes[source][-1]]
        kernel = tf.cast(tf.convert_to_tensor(layer.kernel), dtype)
        back = tf.nn.conv_transpose(
            flat, kernel, output, layer.strides, padding="VALID"
        )
        entries = self._entries(source)
        return tf.reshape(back, tf.concat([shape, [entries]], 0)), height

    def _farthest(self, rows, ball: Ball) -> tf.Tensor:
        """As `Ball.most`, of rows that live on windows of the input."""
        attacker = ball.perturbations
        bounds = []
        if not ball.limited or attacker.norm != "inf":
            reach = tf.constant(attacker.reach(ball.shape), rows.dtype)
            reach = self._cut(0, tf.reshape(reach, [1, *ball.shape]))
            steepest = PerturbationSet(attacker.norm).support(
                rows * reach[:, :, None]
            )
            bounds.append(ball.rho[:, None, None] * steepest)
        if ball.limited:
            up = self._cut(0, ball.box.high - ball.x)
            down = self._cut(0, ball.x - ball.box.low)
            bounds.append(
                _inner(tf.nn.relu(rows), up) + _inner(tf.nn.relu(-rows), down)
            )
        return bounds[0] if len(bounds) == 1 else tf.minimum(*bounds)

    def _cut(self, index: int, value: tf.Tensor) -> tf.Tensor:
        """The windows [n, positions, entries] of a value [n, ...]."""
        rank = len(self.grid)
        value = tf.broadcast_to(
            value, tf.concat([tf.shape(value)[:1], self.shapes[index]], 0)
        )
        value = tf.pad(value, [(0, 0), *[(1, 1)] * rank, (0, 0)])
        for i, axis in enumerate(self.axes[index]):
            picks = tf.constant(axis.indices(self.grid[i]))
            value = tf.gather(value, picks, axis=1 + 2 * i)
        order = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2)]
        value = tf.transpose(value, [*order, 2 * rank + 1])
        return tf.reshape(value, [-1, self.positions, self._entries(index)])

    def _inside(self, index: int, dtype: tf.DType) -> tf.Tensor:
        """1 where a window lies within a value, else 0."""
        ones = tf.ones([1, *self.shapes[index]], dtype)
        return self._cut(index, ones)[:, :, None]

    def _entries(self, index: int) -> int:
        size = np.prod([axis.size for axis in self.axes[index]], dtype=int)
        return int(size) * self.shapes[index][-1]

    def _padding(
        self, layer: keras.layers.Layer, operation: Operation, axis: int
    ) -> int:
        if layer.padding == "valid":
            return 0
        length = self.shapes[operation.inputs[0]][axis]
        steps = self.shapes[operation.output][axis] - 1
        reached = steps * layer.strides[axis] + layer.kernel_size[axis]
        return max(reached - length, 0) // 2

    def _pays(self) -> bool:
        inner = [index for index in self.axes if index != self.target]
        whole = sum(int(np.prod(self.shapes[index])) for index in inner)
        return sum(map(self._entries, inner)) <= _WORTH * whole


def _is_local(operation: Operation) -> bool:
    """Whether an output reads a window of the input, and no more."""
    if not isinstance(operation, Affine):
        return not isinstance(operation, Max)
    layer = operation.convolution
    if layer is None:
        return operation.scaling
    return (
        layer.data_format == "channels_last"
        and layer.padding in ("same", "valid")
        and all(rate == 1 for rate in layer.dilation_rate)
    )


def _inner(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """[b, p, R, n] times [b', p', n] -> [b'', p'', R]; 1 stands for any."""
    if rows.shape[0] == 1 and rows.shape[1] == 1:
        return tf.tensordot(values, rows[0, 0], [[2], [1]])
    return tf.matmul(rows, values[..., None])[..., 0]
