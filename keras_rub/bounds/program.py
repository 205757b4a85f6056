"""A network as a short list of the only operations that a bound knows.

Every supported layer is *lowered* by a rule to affine maps, convex
activations and maxima. A bound is then one small loop over these three kinds,
and a new layer is one new rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_rub.bounds.activations import ConvexActivation


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
    convolution. These only help to find out cheaply what moving one feature
    does.
    """

    apply: Callable[..., tf.Tensor]
    magnitude: Callable[..., tf.Tensor]
    monomial: bool = False
    scaling: bool = False
    convolution: keras.layers.Layer | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Convex(Operation):
    """An elementwise convex non-decreasing function."""

    activation: ConvexActivation


@dataclasses.dataclass(frozen=True, eq=False)
class Max(Operation):
    """The maximum over one axis, which must not be the batch axis."""

    axis: int


class Program:
    """Operations in the order of evaluation; value 0 is the input."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.output = 0
        self._layer = "input"

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
                layer=self._layer,
                **fields,
            )
        )
        return Symbol(self, index)

    def prefix(self) -> list[Operation]:
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

    def suffix(self) -> list[Operation]:
        """The operations through which the output is affine."""
        inside = set()
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
        """
        return self.program.add(
            Affine,
            [self],
            apply=apply,
            magnitude=magnitude,
            monomial=monomial or scaling,
            scaling=scaling,
            convolution=convolution,
        )

    def convex(self, activation: ConvexActivation) -> Symbol:
        """An elementwise convex non-decreasing function of this tensor."""
        if activation.is_identity:
            return self
        return self.program.add(Convex, [self], activation=activation)

    def max(self, axis: int) -> Symbol:
        """The maximum over a negative (counted from the end) axis."""
        return self.program.add(Max, [self], axis=axis)


def affine(
    symbols: Sequence[Symbol],
    apply: Callable[..., tf.Tensor],
    magnitude: Callable[..., tf.Tensor],
) -> Symbol:
    """An affine map of several tensors together; see `Symbol.affine`."""
    return symbols[0].program.add(
        Affine, symbols, apply=apply, magnitude=magnitude
    )


class UnsupportedLayerError(ValueError):
    """A layer of the network has no rule for the bound that was asked for."""


Rule = Callable[..., Symbol]
_RULES: dict[type, Rule] = {}


def register_rule(*layer_types: type) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of these layer types.

    The rule takes the layer and the symbol of its input (a list of symbols
    for a layer that merges several inputs), and returns the symbol of its
    output. A subclass of the layer types uses it too, if it has the same
    `call`. A rule that is registered later replaces an earlier one.

    Args:
        *layer_types: one or more `keras.layers.Layer` subclasses.

    Example:
    ```python
    @keras_rub.register_rule(Gain)
    def gain(layer, x):
        return x.affine(
            lambda t: t * layer.gain,
            lambda r: r * tf.abs(layer.gain),
        )
    ```
    """

    def register(rule: Rule) -> Rule:
        for layer_type in layer_types:
            _RULES[layer_type] = rule
        return rule

    return register


def lower(model: keras.Model) -> Program:
    """Translates a built Sequential or Functional classifier to a program.

    Args:
        model: built model with one input and one output, logits [batch, K].

    Returns:
        The program. It reads the model's variables when it runs, so it stays
        right while they are trained.
    """
    program = Program()
    program.output = _lower_model(model, [program.input]).index
    return program


def _lower_model(model: keras.Model, inputs: list[Symbol]) -> Symbol:
    if not _is_graph(model):
        raise UnsupportedLayerError(
            f"The RUB bound needs a Sequential or Functional model, whose "
            f"layers it can read one by one. Received: {model.name!r} of type "
            f"{type(model).__name__}. Rebuild it with the functional API, or "
            "use keras_rub.ARUBModel, which needs gradients only."
        )
    if len(model.outputs) != 1 or len(model.inputs) != len(inputs):
        raise UnsupportedLayerError(
            f"Model {model.name!r} must have one output and {len(inputs)} "
            f"input(s). Received: {len(model.inputs)} input(s) and "
            f"{len(model.outputs)} output(s)"
        )
    values = {
        id(tensor): symbol
        for tensor, symbol in zip(model.inputs, inputs, strict=True)
    }
    for node in _nodes_in_order(model):
        if all(id(tensor) in values for tensor in node.outputs):
            continue
        args = keras.tree.map_structure(
            lambda leaf: values.get(id(leaf), leaf), list(node.arguments.args)
        )
        if len(node.outputs) != 1:
            raise unsupported(node.operation)
        extra = sorted(
            name
            for name, value in node.arguments.kwargs.items()
            if value is not None and name != "training"
        )
        if extra:
            raise unsupported(node.operation, f"called with {extra}")
        values[id(node.outputs[0])] = _lower_operation(
            node.operation, args, inputs[0].program
        )
    return values[id(model.outputs[0])]


def _lower_operation(operation, args, program: Program) -> Symbol:
    if isinstance(operation, keras.Model):
        return _lower_model(operation, keras.tree.flatten(args))
    for layer_type in type(operation).__mro__:
        if layer_type in _RULES:
            if type(operation).call is not layer_type.call:
                raise unsupported(operation, "with a `call` of its own")
            program._layer = operation.name
            return _RULES[layer_type](operation, *args)
    raise unsupported(operation)


def unsupported(layer, detail: str = "") -> UnsupportedLayerError:
    """The error for a layer that no rule covers, for a rule to raise."""
    kind = " ".join([type(layer).__name__, *([detail] if detail else [])])
    return UnsupportedLayerError(
        f"Layer {layer.name!r} ({kind}) has no rule for this bound. Use "
        "keras_rub.ARUBModel, which needs gradients only and works on any "
        "differentiable layer, replace the layer by a supported one (ReLU "
        "for GELU, for example), or write its rule with "
        "@keras_rub.register_rule."
    )


def _is_graph(model: keras.Model) -> bool:
    # A Sequential or Functional model knows its symbolic inputs and outputs; a
    # subclassed one that was only called does not.
    return bool(getattr(model, "inputs", None)) and bool(
        getattr(model, "outputs", None)
    )


def _nodes_in_order(model: keras.Model) -> list[Any]:
    """Every call of a layer between the model's inputs and its output."""
    ends = {id(tensor) for tensor in model.inputs}
    order, seen = [], set()
    # Each entry is visited twice: to push its parents, then to be listed.
    stack = [(model.outputs[0], False)]
    while stack:
        tensor, ready = stack.pop()
        if id(tensor) in ends:
            continue
        history = tensor._keras_history
        node = history.operation._inbound_nodes[history.node_index]
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((tensor, True))
            stack.extend((parent, False) for parent in node.input_tensors)
    return order
