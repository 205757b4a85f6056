"""A convolutional network, where one pixel reaches only a patch of each value.

Outside that patch the majorant is what it is at the clean input. So the
vertices of a few neighbouring pixels, a cell, are evaluated together, as
differences from the clean input that live on patches: small where the network
begins, growing with every convolution. Cells lie as far apart as the network
strides, so that the patches of all cells have the same size and place.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_rub.bounds.first_layer import WIDEST_MATRIX, matrix_of
from keras_rub.bounds.majorant import Majorant, Relaxation
from keras_rub.bounds.program import Affine, Convex, Max, Operation
from keras_rub.bounds.vertex_expansion import VertexExpansion

# Patches must be smaller than the values themselves, by this much, to be
# worth the cutting and pasting.
_WORTH = 0.5


@dataclasses.dataclass(frozen=True)
class Span:
    """What cells reach along one axis of a value.

    Cell q reaches the positions from `q * step + first` on, `size` of them.
    Those in [0, length) exist.
    """

    first: int
    size: int
    step: int
    length: int

    def through_window(
        self, window: int, stride: int, before: int, length: int
    ) -> Span:
        """The outputs whose window, of padded inputs, has such a position."""
        first = -((window - 1 - self.first - before) // stride)
        last = (self.first + self.size - 1 + before) // stride
        return Span(first, last - first + 1, self.step // stride, length)

    def padding(self, cells: int) -> tuple[int, int]:
        """How far cells reach beyond the value's ends."""
        last = (cells - 1) * self.step + self.first + self.size
        return max(-self.first, 0), max(last - self.length, 0)


Spans = tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """A convolution of differences; `paddings` complete its windows."""

    layer: keras.layers.Layer
    output: int
    paddings: list[tuple[int, int]]
    spans: Spans

    def __call__(self, delta, absolute: bool = False):
        kernel = tf.cast(tf.convert_to_tensor(self.layer.kernel), delta.dtype)
        return tf.nn.convolution(
            tf.pad(delta, [(0, 0), *self.paddings, (0, 0)]),
            tf.abs(kernel) if absolute else kernel,
            strides=self.layer.strides,
            padding="VALID",
            dilations=self.layer.dilation_rate,
        )


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """A map that scales channels, the same at every position."""

    operation: Affine
    spans: Spans

    @property
    def output(self) -> int:
        return self.operation.output

    def __call__(self, delta, absolute: bool = False):
        ones = tf.ones([1] * (len(delta.shape) - 1) + [delta.shape[-1]])
        ones = tf.cast(ones, delta.dtype)
        if absolute:
            return delta * self.operation.magnitude(ones)
        apply = self.operation.apply
        return delta * (apply(ones) - apply(tf.zeros_like(ones)))


@dataclasses.dataclass(frozen=True)
class _Bend:
    """An activation, or a maximum over tiles of sizes `tiles`."""

    operation: Operation
    source: int  # the value that it reads, before it is cut into tiles
    paddings: list[tuple[int, int]]  # to whole tiles
    tiles: tuple[int, ...]
    spans: Spans  # of what it reads, with whole tiles
    spans_out: Spans

    @property
    def output(self) -> int:
        return self.operation.output


_Stage = _Convolution | _Scaling | _Bend


@dataclasses.dataclass(frozen=True)
class Plan:
    """How cells travel through a network: what its layers alone decide.

    Attributes:
        before: maps that scale the input.
        stages: from the first convolution on.
        value: number of the last value that has patches.
        closing: affine maps from there to `end`, of which all but one only
            move or scale; empty where the margins read `value` themselves.
        end: number of the value that they make.
        rest: operations between that and the margins.
        cell: sizes of a cell of pixels.
        counts: how many cells there are along each axis.
    """

    before: list[Affine]
    stages: list[_Stage]
    value: int
    closing: list[Affine]
    end: int
    rest: list[Operation]
    cell: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def spans(self) -> Spans:
        """Those of the last value."""
        last = self.stages[-1]
        return last.spans_out if isinstance(last, _Bend) else last.spans

    @property
    def widest(self) -> int:
        """Entries of the largest patch."""
        return max(
            np.prod([span.size for span in stage.spans], dtype=int)
            for stage in self.stages
        )


def plan(relaxation: Relaxation) -> Plan | None:
    """Finds out how cells travel, or returns `None`.

    There must be a chain of plain convolutions, activations and maxima over
    tiles, with what follows it behind one affine map; and it must pay.
    """
    values = relaxation.values
    rank = len(values[0].shape) - 2
    chain = _chain(relaxation)
    convolutions = [
        op.convolution
        for op in chain
        if isinstance(op, Affine) and op.convolution is not None
    ]
    if not convolutions or rank < 1:
        return None
    strides = [layer.strides for layer in convolutions] + [
        op.tiles for op in chain if isinstance(op, Affine) and op.tiles
    ]
    cell = tuple(int(np.prod(sizes)) for sizes in zip(*strides, strict=True))
    lengths = values[0].shape[1:-1]
    counts = tuple(
        -(-length // size) for length, size in zip(lengths, cell, strict=True)
    )
    spans = tuple(
        Span(0, size, size, length)
        for length, size in zip(lengths, cell, strict=True)
    )
    before: list[Affine] = []
    stages: list[_Stage] = []
    value, tiles = 0, None
    for operation in chain:
        if isinstance(operation, Affine) and operation.tiles:
            tiles = operation.tiles
            continue
        if isinstance(operation, Affine) and operation.convolution is None:
            if not stages:
                before.append(operation)
            else:
                stages.append(_Scaling(operation, spans))
        elif isinstance(operation, Affine):
            shape = values[operation.output].shape[1:-1]
            stages.append(_convolve(operation, spans, shape))
            spans = stages[-1].spans
        else:
            bend = _bend(operation, value, spans, tiles)
            stages.append(bend)
            spans, tiles = bend.spans_out, None
        value = operation.output
    found = _closing(relaxation, value)
    if found is None:
        return None
    closing, end, rest = found
    result = Plan(before, stages, value, closing, end, rest, cell, counts)
    return result if _pays(result, relaxation) else None


def _chain(relaxation: Relaxation) -> list[Operation]:
    """The operations up to the last whose output has patches."""
    operations: list[Operation] = []
    value, seen_convolution = 0, False
    for operation in relaxation.body:
        if operation.inputs != (value,) or _readers(relaxation, value) != 1:
            break
        if isinstance(operation, Affine):
            seen_convolution |= operation.convolution is not None
            allowed = (
                _is_plain(operation.convolution)
                or (operation.scaling and _is_uniform(relaxation, operation))
                or (operation.scaling and not seen_convolution)
                or operation.tiles is not None
            )
        else:
            allowed = isinstance(operation, (Convex, Max)) and seen_convolution
            if isinstance(operation, Max):
                last = operations[-1] if operations else None
                allowed &= isinstance(last, Affine) and last.tiles is not None
        if not allowed:
            break
        operations.append(operation)
        value = operation.output
    if operations and getattr(operations[-1], "tiles", None):
        operations.pop()  # the maximum over them is missing
    return operations


def _readers(relaxation: Relaxation, value: int) -> int:
    return sum(value in op.inputs for op in relaxation.program.operations)


def _is_plain(layer: keras.layers.Layer | None) -> bool:
    return (
        layer is not None
        and layer.data_format == "channels_last"
        and layer.padding in ("same", "valid")
    )


def _is_uniform(relaxation: Relaxation, operation: Affine) -> bool:
    """Whether a map that scales does so alike at every position."""
    shape = relaxation.values[operation.output].shape
    ones = tf.ones([1] * (len(shape) - 1) + [shape[-1]])
    return operation.apply(ones).shape == ones.shape


def _convolve(operation, spans: Spans, shape: Sequence[int]) -> _Convolution:
    layer, paddings, result = operation.convolution, [], []
    for axis, span in enumerate(spans):
        stride = layer.strides[axis]
        window = (layer.kernel_size[axis] - 1) * layer.dilation_rate[axis] + 1
        before = 0
        if layer.padding == "same":
            total = (shape[axis] - 1) * stride + window - span.length
            before = max(total, 0) // 2
        new = span.through_window(window, stride, before, shape[axis])
        start = new.first * stride - before
        end = (new.first + new.size - 1) * stride - before + window
        paddings.append((span.first - start, end - span.first - span.size))
        result.append(new)
    return _Convolution(layer, operation.output, paddings, tuple(result))


def _bend(operation, source: int, spans: Spans, tiles) -> _Bend:
    tiles = (1,) * len(spans) if tiles is None else tuple(tiles)
    paddings, whole, outputs = [], [], []
    for span, size in zip(spans, tiles, strict=True):
        out = span.through_window(size, size, 0, span.length // size)
        first, count = out.first * size, out.size * size
        before = span.first - first
        paddings.append((before, count - span.size - before))
        whole.append(Span(first, count, span.step, span.length))
        outputs.append(out)
    return _Bend(
        operation, source, paddings, tiles, tuple(whole), tuple(outputs)
    )


def _closing(relaxation: Relaxation, value: int):
    """What follows the last value with patches, or `None`."""
    body = relaxation.body
    if relaxation.ends == [value]:
        return [], value, []
    closing, end = [], value
    for operation in body:
        if operation.inputs == (end,) and isinstance(operation, Affine):
            if _readers(relaxation, end) != 1:
                break
            closing.append(operation)
            end = operation.output
            if not operation.monomial:
                break
    if not closing:
        return None
    rest = [op for op in body if op.output > end]
    known = {end, *(op.output for op in rest)}
    later = [*rest, *relaxation.suffix]
    read = {index for op in later for index in op.inputs}
    made = known | {op.output for op in relaxation.suffix}
    if not read <= made or not set(relaxation.ends) <= known:
        return None
    width = tf.TensorShape(relaxation.values[end].shape[1:]).num_elements()
    return None if width > WIDEST_MATRIX else (closing, end, rest)


def _pays(result: Plan, relaxation: Relaxation) -> bool:
    """Whether cells touch far fewer entries than whole values have."""

    def entries(operations) -> int:
        shapes = [relaxation.values[op.output].shape[1:] for op in operations]
        return sum(tf.TensorShape(shape).num_elements() for shape in shapes)

    # Values from the closing map on are whole.
    first = result.end if result.closing else np.inf
    touched = entries(op for op in relaxation.body if op.output >= first)
    for stage in result.stages:
        channels = relaxation.values[stage.output].shape[-1]
        touched += channels * int(np.prod([s.size for s in stage.spans]))
    return touched <= _WORTH * entries(relaxation.body)


class Patches:
    """The majorant of one batch at all vertices, cell by cell.

    Args:
        plan: how cells travel.
        relaxation: the network, made ready for the batch.
        expansion: built `VertexExpansion` layer.
        rho: tensor [batch]. The radii.
        memory_budget: int. Bytes that one cell of some samples may take.
    """

    def __init__(
        self,
        plan: Plan,
        relaxation: Relaxation,
        expansion: VertexExpansion,
        rho: tf.Tensor,
        memory_budget: int,
    ):
        self.plan = plan
        self.relaxation = relaxation
        self.expansion = expansion
        self.rho = rho
        self.memory_budget = memory_budget
        x = relaxation.values[0]
        self.dtype, self.channels = x.dtype, x.shape[-1]
        self.rank = len(plan.cell)
        self.clean = relaxation.propagate({0: Majorant(x)}, 1)
        self.response = self._response()
        self.steps = self._steps()
        if plan.closing:
            self.matrix = matrix_of(
                plan.closing, plan.value, plan.end, relaxation.values
            )

    def margins(self) -> tf.Tensor:
        """The margins [batch, V, K - 1] at all vertices."""
        batch = tf.shape(self.rho)[0]
        moves = 2 * int(np.prod(self.plan.cell)) * self.channels
        channels = max(
            self.relaxation.values[stage.source].shape[-1]
            for stage in self.plan.stages
            if isinstance(stage, _Bend)
        )
        row = 8 * self.dtype.size * self.plan.widest * channels
        chunk = max(self.memory_budget // (moves * row), 1)
        parts = tf.TensorArray(
            self.dtype, size=0, dynamic_size=True, infer_shape=False
        )

        def step(first, parts):
            last = tf.minimum(first + chunk, batch)
            values = self._take(tf.range(first, last))._of_samples()
            return last, parts.write(parts.size(), values)

        width = self.relaxation.constant.shape[-1]
        parts = parts.write(
            0, tf.zeros([0, self.expansion.num_vertices, width], self.dtype)
        )
        _, parts = tf.while_loop(
            lambda first, parts: first < batch,
            step,
            (tf.constant(0), parts),
            parallel_iterations=1,
        )
        return tf.ensure_shape(
            parts.concat(), [None, self.expansion.num_vertices, width]
        )

    def _take(self, samples: tf.Tensor) -> Patches:
        """The same for some samples."""
        taken = copy.copy(self)
        taken.relaxation = self.relaxation.take(samples)
        taken.rho = tf.gather(self.rho, samples)
        taken.clean = {
            index: _map_pair(lambda part: tf.gather(part, samples), pair)
            for index, pair in self.clean.items()
        }
        return taken

    def _response(self) -> tf.Tensor:
        """What the pixels of a cell do to the first patch: [F, ..., C]."""
        size = int(np.prod(self.plan.cell)) * self.channels
        eye = tf.eye(size, dtype=self.dtype)
        one = tf.reshape(eye, [size, *self.plan.cell, self.channels])
        convolution = self.plan.stages[0]
        assert isinstance(convolution, _Convolution)
        return convolution(one)

    def _steps(self) -> tf.Tensor:
        """What a radius of one moves each pixel by, with whole cells."""
        shape = self.relaxation.values[0].shape[1:]
        half = self.expansion.num_vertices // 2
        features, steps = self.expansion.moves(tf.range(half), self.dtype)
        size = self.expansion.input_size
        one = tf.reshape(
            tf.scatter_nd(features[:, None], steps, [size]), [1, *shape]
        )
        moved, still = one, tf.zeros_like(one)
        for operation in self.plan.before:
            moved, still = operation.apply(moved), operation.apply(still)
        ends = [
            (0, count * size - length)
            for count, size, length in zip(
                self.plan.counts, self.plan.cell, shape[:-1], strict=True
            )
        ]
        return tf.pad((moved - still)[0], [*ends, (0, 0)])

    def _of_samples(self) -> tf.Tensor:
        """The margins [batch, V, K - 1], all samples at once."""
        plan = self.plan
        padded = self._pad_maps()
        cells = list(itertools.product(*(range(n) for n in plan.counts)))
        width = self.relaxation.constant.shape[-1]
        moves = 2 * int(np.prod(plan.cell)) * self.channels
        values = tf.map_fn(
            lambda cell: self._of_cell(cell, padded),
            tf.constant(cells, tf.int32),
            fn_output_signature=tf.TensorSpec([None, moves, width], self.dtype),
            parallel_iterations=1,
        )  # [cells, batch, moves, K - 1]
        rank, lengths = self.rank, self.relaxation.values[0].shape[1:-1]
        values = tf.reshape(
            values, [*plan.counts, -1, 2, *plan.cell, self.channels, width]
        )
        axes = [[axis, rank + 2 + axis] for axis in range(rank)]
        values = tf.transpose(
            values, [rank, rank + 1, *sum(axes, []), 2 * rank + 2, 2 * rank + 3]
        )
        whole = [
            n * size for n, size in zip(plan.counts, plan.cell, strict=True)
        ]
        values = tf.reshape(values, [-1, 2, *whole, self.channels, width])
        inside = [slice(length) for length in lengths]
        values = values[(slice(None), slice(None), *inside)]
        values = tf.reshape(values, [-1, 2, self.expansion.input_size, width])
        half = self.expansion.num_vertices // 2
        features, _ = self.expansion.moves(tf.range(half), self.dtype)
        values = tf.gather(values, features, axis=2)
        return tf.reshape(values, [-1, 2 * half, width])

    # Maps, from which the patches of a cell are cut --------------------------

    def _pad_maps(self) -> _Maps:
        """All that cells read, padded so that every patch lies inside."""
        plan = self.plan
        choices, before, behind = {}, {}, {}
        for stage in plan.stages:
            if not isinstance(stage, _Bend):
                continue
            output, spans = stage.output, stage.spans_out
            choice = self.relaxation.choices[output]
            tiled = len(choice.shape) > self.rank + 2
            choices[output] = self._padded(choice, spans, 2 if tiled else 1)
            before[output] = self._padded_pair(stage.source, stage.spans)
            behind[output] = self._padded_pair(output, spans)
        if plan.closing:
            rows = self.matrix[None]  # [1, inputs, outputs]
        else:
            rows = tf.transpose(self.relaxation.rows[plan.value], [0, 2, 1])
        shape = self.relaxation.values[plan.value].shape[1:]
        rows = tf.reshape(rows, [-1, *shape, rows.shape[-1]])
        return _Maps(choices, before, behind, self._padded(rows, plan.spans))

    def _padded(self, tensor: tf.Tensor, spans: Spans, stride=1) -> tf.Tensor:
        """Pads the axes 1, 1 + stride, ... for the patches of all cells."""
        paddings = [(0, 0)] * len(tensor.shape)
        for axis, span in enumerate(spans):
            paddings[1 + stride * axis] = span.padding(self.plan.counts[axis])
        return tf.pad(tensor, paddings)

    def _padded_pair(self, index: int, spans: Spans) -> Majorant:
        return _map_pair(
            lambda part: self._padded(part, spans), self.clean[index]
        )

    @staticmethod
    def _cut(padded: tf.Tensor, cell, spans: Spans, stride=1) -> tf.Tensor:
        """The patch of one cell."""
        begin = [0] * len(padded.shape)
        size = [-1] * len(padded.shape)
        for axis, span in enumerate(spans):
            start = span.first + max(-span.first, 0)
            begin[1 + stride * axis] = cell[axis] * span.step + start
            size[1 + stride * axis] = span.size
        return tf.slice(padded, begin, size)

    def _within(self, delta: Majorant, cell, spans: Spans) -> Majorant:
        """Nothing is different where there are no positions."""
        mask = tf.ones([1], self.dtype)
        for axis, span in reversed(list(enumerate(spans))):
            at = cell[axis] * span.step + span.first + tf.range(span.size)
            inside = tf.cast((at >= 0) & (at < span.length), self.dtype)
            mask = tf.reshape(inside, [-1] + [1] * len(mask.shape)) * mask
        return _map_pair(lambda part: part * mask, delta)

    # One cell ----------------------------------------------------------------

    def _of_cell(self, cell: tf.Tensor, maps: _Maps) -> tf.Tensor:
        """Margins [batch, moves, K - 1]: all pixels up, then all down."""
        plan = self.plan
        begin = [cell[axis] * size for axis, size in enumerate(plan.cell)]
        steps = tf.slice(self.steps, [*begin, 0], [*plan.cell, -1])
        ones = [1] * (self.rank + 1)
        one = tf.reshape(steps, [-1, *ones]) * self.response
        both = tf.concat([one, -one], axis=0)
        copies, shape = both.shape[0], both.shape[1:]
        rho = tf.reshape(self.rho, [-1, 1, *ones])
        delta = Majorant(tf.reshape(rho * both, [-1, *shape]))
        delta = self._within(delta, cell, plan.stages[0].spans)
        for stage in plan.stages[1:]:
            if isinstance(stage, _Bend):
                delta = self._bend(stage, delta, cell, maps, copies)
                spans = stage.spans_out
            else:
                radius = delta.radius
                delta = Majorant(
                    stage(delta.center),
                    None if radius is None else stage(radius, absolute=True),
                )
                spans = stage.spans
            delta = self._within(delta, cell, spans)
        return self._close(delta, cell, maps, copies)

    def _bend(self, stage: _Bend, delta, cell, maps: _Maps, copies) -> Majorant:
        """Past an activation or a maximum, again as a difference."""
        operation, output = stage.operation, stage.output
        clean = _map_pair(
            lambda part: self._cut(part, cell, stage.spans),
            maps.before[output],
        )
        paddings = [(0, 0), *stage.paddings, (0, 0)]
        delta = _map_pair(lambda part: tf.pad(part, paddings), delta)
        point = _combine(tf.add, clean, delta, copies)
        stride, relaxation = 1, copy.copy(self.relaxation)
        if isinstance(operation, Max):
            stride, shape = 2, []
            for span, size in zip(stage.spans_out, stage.tiles, strict=True):
                shape += [span.size, size]
            point = _map_pair(
                lambda part: tf.reshape(part, [-1, *shape, part.shape[-1]]),
                point,
            )
        relaxation.choices = {
            output: self._cut(
                maps.choices[output], cell, stage.spans_out, stride
            )
        }
        bent = relaxation.step(operation, [point], copies)
        clean = _map_pair(
            lambda part: self._cut(part, cell, stage.spans_out),
            maps.behind[output],
        )
        return _combine(lambda old, new: new - old, clean, bent, copies)

    def _close(self, delta: Majorant, cell, maps: _Maps, copies) -> tf.Tensor:
        """From the last patch to the margins."""
        plan, relaxation = self.plan, self.relaxation
        rows = self._cut(maps.rows, cell, plan.spans)
        size = int(np.prod(rows.shape[1:-1]))
        outputs = rows.shape[-1]
        rows = tf.reshape(rows, [-1, size, outputs])

        def product(part, rows):
            if plan.closing:
                return tf.matmul(tf.reshape(part, [-1, size]), rows[0])
            return tf.matmul(tf.reshape(part, [-1, copies, size]), rows)

        center = product(delta.center, rows)
        radius = None
        if delta.radius is not None:
            radius = product(delta.radius, tf.abs(rows))
        if not plan.closing:
            start = {plan.value: self.clean[plan.value]}
            margins = relaxation.margins(start, 1, [])
            return margins + (center if radius is None else center + radius)
        shape = relaxation.values[plan.end].shape[1:]
        moved = _map_pair(
            lambda part: tf.reshape(part, [-1, *shape]),
            Majorant(center, radius),
        )
        point = _combine(tf.add, self.clean[plan.end], moved, copies)
        return relaxation.margins({plan.end: point}, copies, plan.rest)


@dataclasses.dataclass(frozen=True)
class _Maps:
    """What patches are cut from.

    For each activation and maximum, by its output: its choices, and the
    majorants of what it reads and makes, at the clean input.
    """

    choices: dict[int, tf.Tensor]
    before: dict[int, Majorant]
    behind: dict[int, Majorant]
    rows: tf.Tensor


def _map_pair(
    function: Callable[[tf.Tensor], tf.Tensor], pair: Majorant
) -> Majorant:
    center, radius = pair
    return Majorant(
        function(center), None if radius is None else function(radius)
    )


def _combine(function, clean: Majorant, points: Majorant, copies) -> Majorant:
    """`function` of [batch, ...] and [batch * copies, ...], part by part."""

    def of(old, new):
        grouped = tf.reshape(new, [-1, copies, *new.shape[1:]])
        result = function(old[:, None], grouped)
        return tf.reshape(result, [-1, *new.shape[1:]])

    if clean.radius is None and points.radius is None:
        return Majorant(of(clean.center, points.center))
    old, new = (
        tf.zeros_like(pair.center) if pair.radius is None else pair.radius
        for pair in (clean, points)
    )
    return Majorant(of(clean.center, points.center), of(old, new))
