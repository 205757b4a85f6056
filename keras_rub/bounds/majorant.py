"""The convex majorant of a network, evaluated at chosen points.

A pair (U, N) is carried through the program: U bounds a tensor from above, N
bounds its negative from above, and both are convex in the perturbation. It is
kept as its centre (U - N) / 2 and radius (U + N) / 2, because an affine map
then costs two products in place of four.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_rub.bounds import maxima
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.lines import Lines
from keras_rub.bounds.program import (
    Affine,
    Bounded,
    Convex,
    Max,
    Operation,
    Program,
    frontier,
)


class Majorant(NamedTuple):
    """Centre and radius [rows, ...]; a radius of `None` is exactly 0."""

    center: tf.Tensor
    radius: tf.Tensor | None = None

    @property
    def upper(self) -> tf.Tensor:
        """U, a bound of the tensor from above."""
        if self.radius is None:
            return self.center
        return self.center + self.radius

    @property
    def negative(self) -> tf.Tensor:
        """N, a bound of the negated tensor from above."""
        if self.radius is None:
            return -self.center
        return self.radius - self.center

    @classmethod
    def of_halves(cls, upper: tf.Tensor, negative: tf.Tensor) -> Majorant:
        """The majorant with these U / 2 and N / 2."""
        return cls(upper - negative, upper + negative)


class Clean(NamedTuple):
    """What the clean inputs decide: all values, and the lines that touch."""

    values: dict[int, tf.Tensor]
    choices: dict[int, tf.Tensor]


def clean_pass(program: Program, x: tf.Tensor) -> Clean:
    """Runs the network on clean inputs [batch, *features]."""
    values = {0: x}
    choices = {}
    for operation in program.operations:
        inputs = [values[index] for index in operation.inputs]
        if isinstance(operation, Affine):
            value = operation.apply(*inputs)
        elif isinstance(operation, Convex):
            activation = operation.activation
            value = activation.function(*inputs)
            choices[operation.output] = activation.tangent_parameter(*inputs)
        elif isinstance(operation, Bounded):
            value = operation.activation.function(*inputs)
        elif isinstance(operation, Max):
            value = maxima.largest(inputs[0], operation.axes)
            # The one position that attains the maximum (the first one).
            choices[operation.output] = maxima.first_largest(
                inputs[0], operation.axes
            )
        values[operation.output] = value
    return Clean(values, choices)


class Relaxation:
    """A program, made ready for one batch: all that the clean inputs decide.

    The lines below the activations, the winners of the maxima and the margin
    rows come from the clean pass. They may differ between samples but not
    between the points of one sample's perturbation set: that keeps the
    margins convex.

    Args:
        program: the network.
        clean: its clean pass.
        competitors: the classes that compete with the labels.
        choices: dict from an operation's output to the parameters of its
            lines, or `None`. Any choice is sound. Defaults to `None`, the
            lines that touch at the clean inputs, as in the paper.
        lines: dict from the output of each `Bounded` operation to two lines
            [batch, ...] that hold it over the whole perturbation set, or
            `None` if there is none. Without them only `rounding` works on
            a program that has such operations. Defaults to `None`.
    """

    def __init__(
        self,
        program: Program,
        clean: Clean,
        competitors: Competitors,
        choices: Mapping[int, tf.Tensor] | None = None,
        lines: Mapping[int, Lines] | None = None,
    ):
        self.program = program
        self.competitors = competitors
        self.suffix = program.suffix()
        self.body = [
            operation
            for operation in program.operations
            if operation not in self.suffix
        ]
        self.ends = frontier(self.body, self.suffix, program.output)
        self.values = clean.values
        self.choices = {**clean.choices, **(choices or {})}
        self.lines = lines or {}
        self.rows, self.constant = margin_rows(
            program,
            competitors,
            {index: self.values[index].shape[1:] for index in self.ends},
            self.values[0].dtype,
        )
        if choices is None and not self.lines:
            # Lines that touch at the clean input are exact there.
            start, rest = self.values, []
        else:
            start, rest = {0: clean.values[0]}, self.body
        self.clean_margins = self.margins(
            {index: Majorant(value) for index, value in start.items()}, 1, rest
        )[:, 0]

    def take(self, samples: tf.Tensor) -> Relaxation:
        """The same for some samples, in any order, also repeated.

        Only `margins` works on the result.
        """
        taken = copy.copy(self)
        taken.choices = {
            index: tf.gather(choice, samples)
            for index, choice in self.choices.items()
        }
        taken.lines = tf.nest.map_structure(
            lambda part: tf.gather(part, samples), self.lines
        )
        taken.rows = {
            index: tf.gather(row, samples) for index, row in self.rows.items()
        }
        taken.constant = tf.gather(self.constant, samples)
        return taken

    def rounding(self, reach: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """How far rounding may move a margin, as a multiple of epsilon.

        The sum of the magnitudes of all terms that enter a margin, by a pass
        with the absolute values of all weights. An error of relative size
        epsilon in any of them is a fraction of this.

        Args:
            reach: for the values where the network is cut, the largest
                magnitude [batch or 1, ...] that a perturbation adds to them.

        Returns:
            Tensor [batch, K - 1].
        """
        sizes = {0: tf.abs(self.values[0]) + reach.get(0, 0.0)}
        for operation in self.body:
            inputs = [sizes[index] for index in operation.inputs]
            if isinstance(operation, Affine):
                zeros = [tf.zeros_like(value[:1]) for value in inputs]
                constant = tf.abs(operation.apply(*zeros))
                # The padding of a maximum is no number and has no rounding.
                padding = constant > constant.dtype.max / 8
                size = operation.magnitude(*inputs) + tf.where(
                    padding, tf.zeros_like(constant), constant
                )
            elif isinstance(operation, (Convex, Bounded)):
                size = operation.activation.magnitude(inputs[0])
            elif isinstance(operation, Max):
                size = maxima.largest(inputs[0], operation.axes)
            if operation.output in reach:
                size += reach[operation.output]
            sizes[operation.output] = size
        total = tf.abs(self.constant)
        for index, row in self.rows.items():
            size = tf.reshape(sizes[index], [-1, row.shape[-1], 1])
            total += tf.matmul(tf.abs(row), size)[..., 0]
        return total

    def margins(
        self,
        start: Mapping[int, Majorant],
        copies: int | tf.Tensor,
        operations: Sequence[Operation] | None = None,
        chords: Mapping[int, tuple[tf.Tensor, tf.Tensor]] | None = None,
    ) -> tf.Tensor:
        """Upper bounds of the margins at `copies` points a sample.

        Args:
            start: majorants of the values that `operations` read first, each
                of [batch * copies, ...], the points of one sample side by
                side.
            copies: number of points a sample.
            operations: the operations from there to the affine end. Defaults
                to all of them, from the input on.
            chords: slope and height [batch, ...] of lines that take the
                place of some activations, or `None`. With lines above them
                the result is linear in `start` and never below the majorant.

        Returns:
            Tensor [batch, copies, K - 1], by competitor.
        """
        values = self.propagate(start, copies, operations, chords)
        total = self.constant[:, None]
        batch, competitors = tf.shape(total)[0], total.shape[-1]
        for index, row in self.rows.items():
            size = row.shape[-1]
            for part, coefficients in zip(
                values[index], (row, tf.abs(row)), strict=True
            ):
                if part is not None:
                    points = tf.reshape(part, [batch, copies, size])
                    total += tf.matmul(points, coefficients, transpose_b=True)
        return tf.ensure_shape(total, [None, None, competitors])

    def propagate(
        self,
        start: Mapping[int, Majorant],
        copies: int | tf.Tensor,
        operations: Sequence[Operation] | None = None,
        chords: Mapping[int, tuple[tf.Tensor, tf.Tensor]] | None = None,
    ) -> dict[int, Majorant]:
        """The majorants of all values; for the arguments see `margins`."""
        values = dict(start)
        for operation in self.body if operations is None else operations:
            values[operation.output] = self.step(
                operation,
                [values[index] for index in operation.inputs],
                copies,
                None if chords is None else chords.get(operation.output),
            )
        return values

    def step(
        self,
        operation: Operation,
        inputs: Sequence[Majorant],
        copies: int | tf.Tensor,
        chord: tuple[tf.Tensor, tf.Tensor] | None = None,
    ) -> Majorant:
        """The majorant behind one operation; see `margins`."""
        if isinstance(operation, Affine):
            centers = [bound.center for bound in inputs]
            radii = [bound.radius for bound in inputs]
            if all(radius is None for radius in radii):
                return Majorant(operation.apply(*centers))
            radii = [
                tf.zeros_like(center) if radius is None else radius
                for center, radius in zip(centers, radii, strict=True)
            ]
            return Majorant(
                operation.apply(*centers), operation.magnitude(*radii)
            )
        (bound,) = inputs
        if isinstance(operation, Bounded):
            return self._hold(operation, bound, copies)
        choice = self.choices[operation.output]
        if isinstance(operation, Convex):
            # Halved where it is cheapest: on the small tensors of a line.
            slope, height = operation.activation.line(choice)
            if bound.radius is None:
                negative = _for_each_point(
                    tf.multiply, bound.center, -0.5 * slope, copies
                )
            else:
                negative = _for_each_point(
                    tf.multiply, bound.negative, 0.5 * slope, copies
                )
            if height is not None:
                negative = _for_each_point(
                    tf.subtract, negative, 0.5 * height, copies
                )
            if chord is None:
                upper = 0.5 * operation.activation.function(bound.upper)
            else:
                upper = bound.upper
                for function, part in zip(
                    (tf.multiply, tf.add), chord, strict=True
                ):
                    upper = _for_each_point(function, upper, 0.5 * part, copies)
            return Majorant.of_halves(upper, negative)
        assert isinstance(operation, Max)
        chosen = _for_each_point(
            tf.multiply, bound.negative, 0.5 * choice, copies
        )
        return Majorant.of_halves(
            0.5 * maxima.largest(bound.upper, operation.axes),
            maxima.total(chosen, operation.axes),
        )

    def _hold(self, operation: Bounded, bound: Majorant, copies) -> Majorant:
        """U and N by the lines above and below, which are convex again."""
        lines, activation = self.lines[operation.output], operation.activation
        upper = _along(
            bound.upper,
            None if activation.increasing else bound.negative,
            lines.upper_slope,
            lines.upper_height,
            copies,
        )
        negative = _along(
            bound.negative,
            None if activation.increasing else bound.upper,
            lines.lower_slope,
            -lines.lower_height,
            copies,
        )
        if activation.convex_where is not None:
            upper = tf.where(
                activation.convex_where(upper.dtype),
                0.5 * activation.function(bound.upper),
                upper,
            )
        return Majorant.of_halves(upper, negative)


def margin_rows(
    program: Program,
    competitors: Competitors,
    shapes: Mapping[int, Sequence[int]],
    dtype: tf.DType,
) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
    """The margins as affine functions of the values that the suffix reads.

    Merging all affine maps up to the output before their absolute value is
    taken gives the tightest bound.

    Args:
        program: the network.
        competitors: the classes that compete with the labels.
        shapes: the shapes of these values, without the batch.
        dtype: of the result.

    Returns:
        Rows [batch, C, size] for each value, and a constant [batch, C].
    """
    seeds = tf.cast(competitors.seeds, dtype)
    batch, count = tf.shape(seeds)[0], seeds.shape[1]
    seeds = tf.reshape(seeds, [-1, competitors.num_classes])
    zeros = {
        index: tf.zeros([batch * count, *shape], dtype)
        for index, shape in shapes.items()
    }
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        values = dict(zeros)
        for operation in program.suffix():
            values[operation.output] = operation.apply(
                *(values[index] for index in operation.inputs)
            )
        output = values[program.output]
    rows = tape.gradient(
        output, zeros, output_gradients=seeds, unconnected_gradients="zero"
    )
    rows = {
        index: tf.reshape(
            row, [batch, count, tf.TensorShape(shapes[index]).num_elements()]
        )
        for index, row in rows.items()
    }
    constant = tf.reduce_sum(output * seeds, axis=-1)
    return rows, tf.reshape(constant, [batch, count])


def _along(same, other, slope, height, copies):
    """Half of: slope times `same`, or -slope times `other`, plus height.

    `other` is `None` where no slope is negative.
    """
    if other is None:
        half = _for_each_point(tf.multiply, same, 0.5 * slope, copies)
    else:
        half = _for_each_point(
            tf.multiply, same, 0.5 * tf.nn.relu(slope), copies
        ) + _for_each_point(
            tf.multiply, other, 0.5 * tf.nn.relu(-slope), copies
        )
    return _for_each_point(tf.add, half, 0.5 * height, copies)


def _for_each_point(function, points, per_sample, copies):
    """`function` of [batch * copies, ...] and [batch, ...], row by row."""
    if isinstance(copies, int) and copies == 1:
        return function(points, per_sample)
    shape = tf.shape(points)
    grouped = tf.reshape(points, tf.concat([[-1, copies], shape[1:]], axis=0))
    result = tf.reshape(function(grouped, per_sample[:, None]), shape)
    return tf.ensure_shape(result, [None, *points.shape[1:]])
