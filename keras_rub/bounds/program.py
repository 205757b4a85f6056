"""A network as a short list of the only operations that a bound knows.

Every supported layer is *lowered* by a rule to affine maps, activations and
maxima. A bound is then one small loop over these kinds, and a new layer is one
new rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from keras_rub.bounds.activations import Activation, ConvexActivation
from keras_rub.bounds.lines import BoundedActivation


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One step of a program: reads values `inputs`, writes value `output`."""

    inputs: tuple[int, ...]
    output: int
    layer: str


@dataclasses.dataclass(frozen=True, eq=False)
class Affine(Operation):
    """`apply(*xs)` is affine in the inputs together.

    `magnitude(*radii)` is the same map without its constant and with the
    absolute value of every coefficient. `monomial` maps scale, move or drop
    features, so that each output reads at most one input; `scaling` maps
    leave them where they are; `convolution` is the layer of a plain
    convolution; `tiles` maps cut every axis between batch and channels into
    pieces of these sizes, and drop what is left over; `matrix` of a type gives
    the matrix that the last axis is multiplied by. These only help to find out
    cheaply what moving one feature does.
    """

    apply: Callable[..., tf.Tensor]
    magnitude: Callable[..., tf.Tensor]
    monomial: bool = False
    scaling: bool = False
    convolution: keras.layers.Layer | None = None
    tiles: tuple[int, ...] | None = None
    matrix: Callable[[tf.DType], tf.Tensor] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Convex(Operation):
    """An elementwise convex non-decreasing function."""

    activation: ConvexActivation


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded(Operation):
    """An elementwise function that two lines hold over a known range."""

    activation: BoundedActivation


@dataclasses.dataclass(frozen=True, eq=False)
class Max(Operation):
    """The maximum over some axes, none of which is the batch axis.

    They are negative, counted from the end, and go from the last to the first.
    """

    axes: tuple[int, ...]


class Program:
    """Operations in the order of evaluation; value 0 is the input.

    Args:
        input_shape: the shape of one input.
        num_classes: int. K, the number of logits.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        self.input_shape = input_shape
        self.num_classes = num_classes
        self.operations: list[Operation] = []
        self.output = 0
        self.layer = "input"  # the one that is being lowered

    @property
    def input(self) -> Symbol:
        return Symbol(self, 0)

    def add(self, kind: type[Operation], inputs, **fields) -> Symbol:
        """Appends one operation and returns the symbol of its result."""
        index = len(self.operations) + 1
        self.operations.append(
            kind(
                inputs=tuple(symbol.index for symbol in inputs),
                output=index,
                layer=self.layer,
                **fields,
            )
        )
        return Symbol(self, index)

    def last_bounded(self) -> int:
        """How many operations there are up to the last `Bounded` one."""
        bounded = [isinstance(op, Bounded) for op in self.operations]
        return max((i + 1 for i, yes in enumerate(bounded) if yes), default=0)

    def prefix(self) -> list[Affine]:
        """The operations through which the input is still affine."""
        affine = {0}
        found = []
        for operation in self.operations:
            if isinstance(operation, Affine) and affine.issuperset(
                operation.inputs
            ):
                affine.add(operation.output)
                found.append(operation)
        return found

    def suffix(self) -> list[Affine]:
        """The operations through which the output is affine."""
        inside: set[int] = set()
        found = []
        for operation in reversed(self.operations):
            consumers = {
                other.output
                for other in self.operations
                if operation.output in other.inputs
            }
            is_read = operation.output == self.output or consumers
            if (
                isinstance(operation, Affine)
                and is_read
                and inside.issuperset(consumers)
            ):
                inside.add(operation.output)
                found.append(operation)
        return found[::-1]


def pull_back(
    function: Callable[..., tf.Tensor],
    rows: tf.Tensor,
    shapes: Sequence[Sequence[int]],
) -> list[tf.Tensor]:
    """Linear functions of a map's output, in terms of its inputs.

    Args:
        function: an affine map of tensors [n, ...].
        rows: tensor [n, ...] like its output.
        shapes: the shapes of its inputs without the batch.

    Returns:
        One tensor [n, ...] for each input.
    """
    count = tf.shape(rows)[0]
    zeros = [tf.zeros([count, *shape], rows.dtype) for shape in shapes]
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        output = function(*zeros)
    return tape.gradient(
        output, zeros, output_gradients=rows, unconnected_gradients="zero"
    )


def frontier(
    inside: Sequence[Operation], outside: Iterable[Operation], output: int
) -> list[int]:
    """Values made by `inside` (or the input) that `outside` reads."""
    made = {0, *(operation.output for operation in inside)}
    read = {index for operation in outside for index in operation.inputs}
    read.add(output)
    return sorted(made & read)


@dataclasses.dataclass(frozen=True)
class Symbol:
    """What a rule gets in place of a tensor, and what it returns.

    Its methods say what the layer does; nothing is computed yet.
    """

    program: Program
    index: int

    def affine(
        self,
        apply: Callable[[tf.Tensor], tf.Tensor],
        magnitude: Callable[[tf.Tensor], tf.Tensor],
        *,
        monomial: bool = False,
        scaling: bool = False,
        convolution: keras.layers.Layer | None = None,
        tiles: tuple[int, ...] | None = None,
        matrix: Callable[[tf.DType], tf.Tensor] | None = None,
    ) -> Symbol:
        """An affine map of this tensor.

        Args:
            apply: function of a tensor [n, ...]. The map itself, with its
                constant. It must treat the n rows apart from each other.
            magnitude: function of a tensor [n, ...]. The map without its
                constant and with the absolute value of every coefficient.
            monomial: whether each output reads at most one input. Speeds up
                screening when the map stands before a first convolution.
                Defaults to `False`.
            scaling: whether the map is monomial and leaves every feature
                where it is. Defaults to `False`.
            convolution: the layer, where the map is a plain convolution
                with the attributes of `keras.layers.Conv2D`. Speeds up
                screening. Defaults to `None`.
            tiles: sizes, where the map is a cut of [n, length, ..., channels]
                to [n, length // size, size, ..., channels]. Speeds up the
                evaluation of vertices. Defaults to `None`.
            matrix: function of a type, where the map multiplies the last axis
                by a matrix [inputs, outputs] and adds a constant. Saves the
                product that would find it. Defaults to `None`.
        """
        return self.program.add(
            Affine,
            [self],
            apply=apply,
            magnitude=magnitude,
            monomial=monomial or scaling,
            scaling=scaling,
            convolution=convolution,
            tiles=tiles,
            matrix=matrix,
        )

    def convex(self, activation: ConvexActivation) -> Symbol:
        """An elementwise convex non-decreasing function of this tensor."""
        if activation.is_identity:
            return self
        return self.program.add(Convex, [self], activation=activation)

    def activate(self, activation: Activation) -> Symbol:
        """Any activation of this tensor, elementwise."""
        if isinstance(activation, ConvexActivation):
            return self.convex(activation)
        return self.program.add(Bounded, [self], activation=activation)

    def max(self, axis: int | tuple[int, ...]) -> Symbol:
        """The maximum over one negative (counted from the end) axis, or some.

        Several go from the last to the first: `(-2, -4)`.
        """
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        return self.program.add(Max, [self], axes=axes)


def affine(
    symbols: Sequence[Symbol],
    apply: Callable[..., tf.Tensor],
    magnitude: Callable[..., tf.Tensor],
) -> Symbol:
    """An affine map of several tensors together; see `Symbol.affine`."""
    return symbols[0].program.add(
        Affine, symbols, apply=apply, magnitude=magnitude
    )
