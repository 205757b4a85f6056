"""From a Keras model to a program, by one registered rule a layer type."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_rub.bounds.program import Program, Symbol
from keras_rub.classifier import (
    Classifier,
    WithoutActivation,
    nodes_in_order,
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


def lower(model: keras.Model, bound: str = "a certificate") -> Program:
    """Translates a built classifier to a program.

    Args:
        model: built model with one input and one output [batch, K]:
            Sequential, Functional, or a subclass whose `call` is made of
            Keras layers and operations; a final softmax, log_softmax or
            sigmoid is left out.
        bound: what the program is for, in words, for errors. Defaults to
            `"a certificate"`.

    Returns:
        The program, which ends with logits: [0, z] where the model has a
        single output. It reads the model's variables when it runs, so it
        stays right while they are trained.
    """
    try:
        graph = Classifier.of(_graph_of(model)).network
    except _Untraced as error:
        raise UnsupportedLayerError(
            f"There is no rule for {bound} here. {error}"
        ) from error
    width = graph.outputs[0].shape[-1]
    program = Program(tuple(graph.inputs[0].shape[1:]), max(width, 2))
    missing: list[str] = []
    output = _lower_model(graph, [program.input], missing)
    if missing:
        raise UnsupportedLayerError(
            _refusal(list(dict.fromkeys(missing)), bound)
        )
    if width == 1:
        output = output.affine(to_classes, to_classes)
    program.output = output.index
    return program


def _refusal(missing: list[str], bound: str) -> str:
    one = len(missing) == 1
    return (
        f"{'Layer' if one else 'Layers'} {'; '.join(missing)} "
        f"{'has' if one else 'have'} no rule for {bound}. Use "
        "keras_rub.ARUBModel, which needs gradients only and works on any "
        "differentiable layer, replace what is named by supported layers, or "
        "write rules with @keras_rub.register_rule (of an activation: "
        "keras_rub.register_activation)."
    )


def _lower_model(
    model: keras.Model, inputs: list[Symbol], missing: list[str]
) -> Symbol:
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
    for node in nodes_in_order(model):
        if all(id(tensor) in values for tensor in node.outputs):
            continue
        args = keras.tree.map_structure(
            lambda leaf: values.get(id(leaf), leaf), list(node.arguments.args)
        )
        try:
            value = _lower_node(node, args, inputs[0].program, missing)
        except _NoRule as error:
            # Go on, so that all layers without a rule are named at once.
            missing.append(error.layer)
            value = inputs[0]
        values.update({id(tensor): value for tensor in node.outputs})
    return values[id(model.outputs[0])]


def _lower_node(node, args, program: Program, missing: list[str]) -> Symbol:
    operation = node.operation
    if len(node.outputs) != 1:
        raise unsupported(operation, "with several outputs")
    extra = sorted(
        name
        for name, value in node.arguments.kwargs.items()
        if name != "training"
        and any(leaf is not None for leaf in keras.tree.flatten(value))
    )
    if extra:
        raise unsupported(operation, f"called with {extra}")
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
    if isinstance(operation, keras.Model):
        try:
            graph = _graph_of(operation, node.input_tensors)
        except _Untraced as error:
            raise unsupported(operation, f": {error}") from error
        return _lower_model(graph, keras.tree.flatten(args), missing)
    raise unsupported(operation)


class _NoRule(UnsupportedLayerError):
    """One layer without a rule; `layer` says which."""

    def __init__(self, layer: str):
        super().__init__(_refusal([layer], "this bound"))
        self.layer = layer


def unsupported(layer, detail: str = "") -> UnsupportedLayerError:
    """The error for a layer that no rule covers, for a rule to raise."""
    kind = " ".join([type(layer).__name__, *([detail] if detail else [])])
    return _NoRule(f"{layer.name!r} ({kind})")


# Models that are no graph -----------------------------------------------------


class _Untraced(Exception):
    """The `call` of a model can't be followed."""


def _graph_of(model: keras.Model, tensors=None) -> keras.Model:
    """The model itself, or what a trace of its `call` shows."""
    if getattr(model, "inputs", None) and getattr(model, "outputs", None):
        return model
    if tensors is None:
        shape = (model.get_build_config() or {}).get("input_shape")
        if not isinstance(shape, (list, tuple)) or not all(
            size is None or isinstance(size, int) for size in shape
        ):
            raise _Untraced(
                f"Model {model.name!r} has not seen an input yet: call it on "
                "some data first, or build it with one input shape. "
                f"Received: `input_shape={shape!r}`"
            )
        shapes = [tuple(shape[1:])]
    else:
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    inputs = [keras.Input(shape) for shape in shapes]
    named = inspect.signature(model.call).parameters
    inference = {"training": False} if "training" in named else {}
    try:
        outputs = model.call(*inputs, **inference)
        return keras.Model(inputs, outputs, name=model.name)
    except Exception as error:
        raise _Untraced(
            f"The `call` of model {model.name!r} of type "
            f"{type(model).__name__} must be made of Keras layers and "
            "operations (keras.ops), which can be read one by one; in the way "
            f"is {_where(error)} ({_first_line(error)}). Or use "
            "keras_rub.ARUBModel, which needs gradients only."
        ) from error


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [
        os.path.dirname(inspect.getfile(module)) for module in (keras, tf)
    ]
    libraries.append(os.path.dirname(os.path.dirname(__file__)))
    own = [
        frame
        for frame in frames
        if not any(frame.filename.startswith(path) for path in libraries)
    ]
    if not own:
        return "its output"
    last = own[-1]
    name = os.path.basename(last.filename)
    return f"line {last.lineno} of {name}, `{last.line}`"


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
