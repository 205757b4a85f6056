"""From a Keras model to a program, by one registered rule a layer type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_rub.bounds.program import Program, Symbol
from keras_rub.classifier import (
    Classifier,
    WithoutActivation,
    has_graph,
    to_classes,
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
        model: built model with one input and one output [batch, K]; a final
            softmax, log_softmax or sigmoid is left out.

    Returns:
        The program, which ends with logits: [0, z] where the model has a
        single output. It reads the model's variables when it runs, so it
        stays right while they are trained.
    """
    _require_graph(model)
    model = Classifier.of(model).network
    width = model.outputs[0].shape[-1]
    program = Program(tuple(model.inputs[0].shape[1:]), max(width, 2))
    output = _lower_model(model, [program.input])
    if width == 1:
        output = output.affine(to_classes, to_classes)
    program.output = output.index
    return program


def _lower_model(model: keras.Model, inputs: list[Symbol]) -> Symbol:
    _require_graph(model)
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
    seen = operation
    if isinstance(operation, WithoutActivation):
        operation, seen = operation.layer, operation.linear
    for layer_type in type(operation).__mro__:
        if layer_type in _RULES:
            inherited = getattr(layer_type, "call", None)
            if type(operation).call is not inherited:
                raise unsupported(operation, "with a `call` of its own")
            program.layer = operation.name
            return _RULES[layer_type](seen, *args)
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


def _require_graph(model: keras.Model) -> None:
    if not has_graph(model):
        raise UnsupportedLayerError(
            f"The RUB bound needs a Sequential or Functional model, whose "
            f"layers it can read one by one. Received: {model.name!r} of type "
            f"{type(model).__name__}. Rebuild it with the functional API, or "
            "use keras_rub.ARUBModel, which needs gradients only."
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
