"""Interval bounds: the range of each value, from layer to layer.

A value that is affine in the input has an exact range: what it is for the
clean input, plus and minus a dual norm. Behind that every operation maps ranges
to ranges, which is as cheap as two passes through the network. The last affine
maps are merged with the differences of logits ("elision"), because the range of
a difference is narrower than the difference of two ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_rub.bounds import knapsack, maxima
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.first_layer import WIDEST_MATRIX, matrix_of
from keras_rub.bounds.lines import Interval
from keras_rub.bounds.majorant import margin_rows
from keras_rub.bounds.program import (
    Affine,
    Bounded,
    Convex,
    Max,
    Operation,
    Program,
    frontier,
    pull_back,
)
from keras_rub.perturbations import PerturbationSet

# Rows that are substituted together, where they depend on the weights only.
_ROWS = 1024


class Ball:
    """The perturbation sets of one batch.

    Args:
        x: tensor [batch, *features]. The clean inputs.
        rho: tensor [] or [batch]. The radii.
        perturbations: `PerturbationSet`. Norm, mask, weights, valid range.
    """

    def __init__(
        self, x: tf.Tensor, rho: tf.Tensor, perturbations: PerturbationSet
    ):
        self.x = x
        self.rho = tf.broadcast_to(tf.cast(rho, x.dtype), tf.shape(x)[:1])
        self.perturbations = perturbations
        self.shape = tuple(x.shape[1:])
        self.size = size_of(x)
        self.limited = perturbations.input_range is not None
        self.switches = perturbations.switches(x, self.rho)
        self.box = self._box()

    def _box(self) -> Interval:
        """The smallest box around the set, cut to the valid range."""
        x = self.x
        reach = self.rho[:, None] * tf.constant(
            self.perturbations.reach(self.shape)[None], x.dtype
        )
        reach = tf.reshape(reach, tf.shape(x))
        room = self.perturbations.room(x)
        up, down = (reach, reach) if room is None else room
        up, down = tf.minimum(reach, up), tf.minimum(reach, down)
        if self.switches is not None:
            rise, fall = self._switched()
            up, down = tf.maximum(up, rise), tf.maximum(down, fall)
        return Interval(x - down, x + up)

    def _switched(self) -> tuple[tf.Tensor, tf.Tensor]:
        """How far switches move each column up, and down."""
        assert self.switches is not None
        moved = self.switches.most * self.switches.sizes  # [batch, S]
        batch = tf.shape(moved)[0]
        blank = tf.zeros([batch, self.size + 1], moved.dtype)
        rows = tf.broadcast_to(tf.range(batch)[:, None], tf.shape(moved))
        columns = tf.broadcast_to(self.switches.columns, tf.shape(moved))

        def most(start, columns, sizes):
            where = tf.stack([rows, columns], axis=-1)
            return tf.tensor_scatter_nd_max(start, where, tf.nn.relu(sizes))

        up = most(blank, columns, moved)
        down = most(blank, columns, -moved)
        # An origin falls as the other rises; the blank column takes the rest.
        down = most(down, self.switches.origins, moved)
        return tuple(
            tf.reshape(part[:, :-1], tf.shape(self.x)) for part in (up, down)
        )

    def most(self, rows: tf.Tensor) -> tf.Tensor:
        """Largest value [batch, R] of rows times a perturbation of the set.

        Args:
            rows: tensor [batch or 1, R, *features].
        """
        count = rows.shape[1]
        count = tf.shape(rows)[1] if count is None else count
        flat = tf.reshape(rows, [tf.shape(rows)[0], count, self.size])
        if self.switches is not None:
            return self._most_with_switches(flat)
        bounds = []
        if not self.limited or self.perturbations.norm != "inf":
            steepest = self.perturbations.support(flat, self.shape)
            bounds.append(self.rho[:, None] * steepest)
        if self.limited:
            high = tf.reshape(self.box.high - self.x, [-1, self.size, 1])
            low = tf.reshape(self.x - self.box.low, [-1, self.size, 1])
            moved = tf.matmul(tf.nn.relu(flat), high) + tf.matmul(
                tf.nn.relu(-flat), low
            )
            bounds.append(moved[..., 0])
        return bounds[0] if len(bounds) == 1 else tf.minimum(*bounds)

    def _most_with_switches(self, rows: tf.Tensor) -> tf.Tensor:
        """The same by a knapsack of moves and switches.

        Args:
            rows: tensor [batch or 1, R, M].
        """
        assert self.switches is not None
        reach = self.perturbations.reach(self.shape)
        free = tf.constant(reach.nonzero()[0], tf.int32)
        steps = tf.constant(reach[reach > 0], rows.dtype)
        slopes = tf.gather(rows, free, axis=2)
        room = self.perturbations.room(self.x)
        assert room is not None  # there are categories
        up, down = (
            tf.gather(tf.reshape(part, [-1, 1, self.size]), free, axis=2)
            for part in room
        )
        length = self.rho[:, None, None] * steps
        room = tf.where(slopes > 0, up, down)
        caps = tf.where(length > room, tf.math.divide_no_nan(room, length), 1.0)
        gains = tf.abs(slopes) * steps + tf.zeros_like(caps)
        switched, limits, _ = knapsack.merge_groups(
            tf.nn.relu(self.switches.differences(rows)),
            self.switches.caps(self.rho),
            self.switches.table,
        )
        found = knapsack.fill(
            tf.concat([gains, switched], axis=-1),
            tf.concat([caps, limits], axis=-1),
            gains.shape[-1] + switched.shape[-1],
        )
        total = tf.reduce_sum(found.shares * found.gains, axis=-1)
        return self.rho[:, None] * total

    def take(self, samples: tf.Tensor) -> Ball:
        """The sets of some of the samples, also repeated ones."""
        return Ball(
            tf.gather(self.x, samples),
            tf.gather(self.rho, samples),
            self.perturbations,
        )


class IntervalBound:
    """Ranges of the values of one batch.

    Args:
        program: the network.
        ball: the perturbation sets.

    Attributes:
        values: dict from the number of a value to its `Interval`. Values
            inside the affine beginning that nothing else reads have none.
    """

    def __init__(self, program: Program, ball: Ball):
        self.program = program
        self.ball = ball
        self.prefix = program.prefix()
        self.suffix = program.suffix()
        self.values: dict[int, Interval] = {0: ball.box}
        body = [op for op in program.operations if op not in self.suffix]
        self.ends = frontier(body, self.suffix, program.output)
        rest = [op for op in body if op not in self.prefix]
        for index in frontier(self.prefix, rest, -1):
            if index:
                self.values[index] = affine_range(program, index, ball)
        for operation in rest:
            self.values[operation.output] = image(
                operation, [self.values[index] for index in operation.inputs]
            )

    @property
    def sources(self) -> list[Interval]:
        """The ranges that activations read."""
        return [
            self.values[operation.inputs[0]]
            for operation in self.program.operations
            if isinstance(operation, (Convex, Bounded))
        ]

    def margins(self, competitors: Competitors) -> tf.Tensor:
        """Upper bounds [batch, C] of the margins, by competitor."""
        x = self.ball.x
        rows, total = margin_rows(
            self.program,
            competitors,
            {index: self._shape(index) for index in self.ends},
            x.dtype,
        )
        affine = {0, *(operation.output for operation in self.prefix)}
        at_input = None
        for index, row in rows.items():
            shape = self._shape(index)
            if index not in affine:
                low, high = (
                    tf.reshape(end, [-1, size_of(end), 1])
                    for end in self.values[index]
                )
                total += tf.matmul(row, 0.5 * (low + high))[..., 0]
                total += tf.matmul(tf.abs(row), 0.5 * (high - low))[..., 0]
                continue
            # Affine in the input: bounded there, together and exactly.
            network = _chain(self.prefix, index)
            at_clean = tf.reshape(network(x), [-1, row.shape[-1], 1])
            total += tf.matmul(row, at_clean)[..., 0]
            (part,) = pull_back(
                network, tf.reshape(row, [-1, *shape]), [self.ball.shape]
            )
            at_input = part if at_input is None else at_input + part
        if at_input is not None:
            count = total.shape[1]
            total += self.ball.most(
                tf.reshape(at_input, [-1, count, *self.ball.shape])
            )
        return total

    def _shape(self, index: int) -> list[int]:
        if index in self.values:
            return list(self.values[index].low.shape[1:])
        blank = tf.zeros([1, *self.ball.shape], self.ball.x.dtype)
        return list(_chain(self.prefix, index)(blank).shape[1:])


def image(operation: Operation, inputs: Sequence[Interval]) -> Interval:
    """The range of an operation's output over the ranges of its inputs."""
    if isinstance(operation, Affine):
        center = operation.apply(*(0.5 * (i.low + i.high) for i in inputs))
        radius = operation.magnitude(*(0.5 * (i.high - i.low) for i in inputs))
        return Interval(center - radius, center + radius)
    (interval,) = inputs
    if isinstance(operation, Convex):
        function = operation.activation.function
        return Interval(function(interval.low), function(interval.high))
    if isinstance(operation, Bounded):
        return operation.activation.image(interval)
    if isinstance(operation, Max):
        return Interval(
            maxima.largest(interval.low, operation.axes),
            maxima.largest(interval.high, operation.axes),
        )
    raise TypeError(f"Unknown operation. Received: {operation!r}")


def affine_range(program: Program, index: int, ball: Ball) -> Interval:
    """The exact range of a value that is affine in the input.

    Args:
        program: the network.
        index: number of a value of its affine beginning.
        ball: the perturbation sets.
    """
    path = _path(program.prefix(), index)
    norm, limited = ball.perturbations.norm, ball.limited
    # Absolute weights are exact for a box where one map at most mixes
    # features; those before and behind it only move and scale them.
    plain = sum(not operation.monomial for operation in path) <= 1
    if norm == "inf" and plain:
        return _along(path, index, ball)
    center = _chain(path, index)(ball.x)
    width, shape = size_of(center), center.shape[1:]
    rho = tf.reshape(ball.rho, [-1] + [1] * len(shape))
    mixed = ball.switches is not None
    if mixed and width > WIDEST_MATRIX:
        return _along(path, index, ball)
    if not limited and not mixed:
        reach = rho * reach_of(path, index, center, ball)
        return Interval(center - reach, center + reach)
    if not mixed and (plain or width > WIDEST_MATRIX):
        box = _along(path, index, ball)
        reach = rho * reach_of(path, index, center, ball)
        return Interval(
            tf.maximum(box.low, center - reach),
            tf.minimum(box.high, center + reach),
        )
    # [1, H, *features], the map itself.
    matrix = tf.transpose(_matrix(path, index, center, ball))
    rows = tf.reshape(matrix, [1, width, *ball.shape])
    up, down = (
        tf.reshape(ball.most(part), tf.shape(center)) for part in (rows, -rows)
    )
    return Interval(center - down, center + up)


def size_of(tensor: tf.Tensor) -> int:
    """Number of entries of one sample of a tensor [batch, ...]."""
    return tf.TensorShape(tensor.shape[1:]).num_elements()


# Values that are affine in the input -----------------------------------------


def _path(prefix: Sequence[Affine], index: int) -> list[Affine]:
    """The operations that one value depends on."""
    wanted, found = {index}, []
    for operation in reversed(prefix):
        if operation.output in wanted:
            wanted.update(operation.inputs)
            found.append(operation)
    return found[::-1]


def _chain(prefix: Sequence[Affine], index: int):
    """The function from the input to one value."""
    path = _path(prefix, index)

    def run(t):
        values = {0: t}
        for operation in path:
            values[operation.output] = operation.apply(
                *(values[i] for i in operation.inputs)
            )
        return values[index]

    return run


def _along(path, index, ball) -> Interval:
    """The range of one value over the box around the set."""
    values = {0: ball.box}
    for operation in path:
        values[operation.output] = image(
            operation, [values[i] for i in operation.inputs]
        )
    return values[index]


def _matrix(path, index, center, ball) -> tf.Tensor:
    return matrix_of(path, 0, index, {0: ball.x, index: center})


def reach_of(
    path: Sequence[Affine], index: int, center: tf.Tensor, ball: Ball
) -> tf.Tensor:
    """How far a radius of one moves each entry of a value: [1, ...].

    The valid range does not count.

    Args:
        path: the operations from the input to the value.
        index: number of the value.
        center: tensor [batch, ...], the value itself.
        ball: the perturbation sets.
    """
    found = _reach_of_convolution(path, ball)
    if found is not None:
        return found
    width, shape = size_of(center), center.shape[1:]
    if width <= WIDEST_MATRIX:
        rows = tf.transpose(_matrix(path, index, center, ball))
        found = ball.perturbations.support(rows, ball.shape)
        return tf.reshape(found, [1, *shape])
    network = _chain(path, index)

    def reach(first):
        rows = tf.one_hot(first + tf.range(_ROWS), width, dtype=center.dtype)
        (rows,) = pull_back(
            network, tf.reshape(rows, [_ROWS, *shape]), [ball.shape]
        )
        flat = tf.reshape(rows, [_ROWS, ball.size])
        return ball.perturbations.support(flat, ball.shape)

    parts = tf.map_fn(
        reach,
        tf.range(0, width, _ROWS),
        fn_output_signature=tf.TensorSpec([_ROWS], center.dtype),
        parallel_iterations=1,
    )
    return tf.reshape(tf.reshape(parts, [-1])[:width], [1, *shape])


def _reach_of_convolution(path, ball) -> tf.Tensor | None:
    """The same for one convolution among maps that only scale, or `None`.

    A dual norm over the entries of each window is again a convolution (L2,
    Linf), or a maximum over the list of them (L1).
    """
    mixing = [op for op in path if not op.scaling]
    if len(mixing) != 1 or mixing[0].convolution is None:
        return None
    layer, norm = mixing[0].convolution, ball.perturbations.norm
    if layer.data_format != "channels_last" or ball.perturbations.categories:
        return None
    dtype = ball.x.dtype
    kernel = tf.abs(tf.cast(tf.convert_to_tensor(layer.kernel), dtype))
    reach = tf.constant(ball.perturbations.reach(ball.shape), dtype)
    reach = tf.reshape(reach, [1, *ball.shape])
    for operation in path:
        if operation is not mixing[0]:
            reach = operation.magnitude(reach)
        elif norm == "inf":
            reach = layer.convolution_op(reach, kernel)
        elif norm == 2:
            square = layer.convolution_op(tf.square(reach), tf.square(kernel))
            positive = square > 0
            # The derivative of sqrt is infinite at 0.
            root = tf.sqrt(tf.where(positive, square, tf.ones_like(square)))
            reach = tf.where(positive, root, tf.zeros_like(root))
        else:
            entries = tf.TensorShape(kernel.shape[:-1]).num_elements()
            picks = tf.reshape(
                tf.eye(entries, dtype=dtype), [*kernel.shape[:-1], entries]
            )
            windows = layer.convolution_op(reach, picks)[..., None]
            flat = tf.reshape(kernel, [entries, kernel.shape[-1]])
            reach = tf.reduce_max(windows * flat, axis=-2)
    return reach
