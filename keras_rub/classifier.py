"""The user's classifier: its logits, and its own outputs made of them.

A final softmax, log_softmax or sigmoid is the *head* of a classifier. Bounds,
attacks and robust losses work on the logits before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_rub.keras_internals import node_of, operation_of
from keras_rub.perturbations import PerturbationSet

HEADS = {
    "softmax": keras.activations.softmax,
    "log_softmax": keras.activations.log_softmax,
    "sigmoid": keras.activations.sigmoid,
}

# What people pass as `activation=`, beside Keras's own.
_FUNCTIONS = {
    **{function: name for name, function in HEADS.items()},
    keras.ops.softmax: "softmax",
    keras.ops.log_softmax: "log_softmax",
    keras.ops.sigmoid: "sigmoid",
    tf.nn.softmax: "softmax",
    tf.nn.log_softmax: "log_softmax",
    tf.nn.sigmoid: "sigmoid",
}

# Operations that the functions of `keras.ops` leave in a graph.
_OPERATIONS = {
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "Sigmoid": "sigmoid",
}

# Layers whose `call` ends with their activation.
_ACTIVATED = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)

# Layers that leave the number of outputs as it is.
_ELEMENTWISE = (
    keras.layers.Activation,
    keras.layers.Identity,
    keras.layers.Softmax,
)


def base_of(model: keras.Model) -> keras.Model:
    """The built network within a robust model, or the model itself.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if it is not built yet.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a robust model or a keras.Model. "
            f"Received: {type(model).__name__}"
        )
    if isinstance(getattr(model, "perturbations", None), PerturbationSet):
        model = model.base
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built yet: train it, or call it once."
        )
    return model


def input_structure(base: keras.Model):
    """The symbolic input as the model takes it: a tensor, or a dict of one."""
    # A Functional model keeps the names of its inputs here; of a Sequential
    # one within another model that is the other one's tensor.
    if isinstance(base, keras.Sequential):
        return base.inputs[0]
    return getattr(base, "input", base.inputs[0])


def input_shape(base: keras.Model) -> tuple[int, ...]:
    """The shape of one input of a built network, also of a subclassed one."""
    if getattr(base, "inputs", None):
        return tuple(base.inputs[0].shape[1:])
    config = base.get_build_config() or {}
    shape = config.get("input_shape")
    if shape is None or any(not isinstance(n, int) for n in shape[1:]):
        raise ValueError(
            f"The input shape of model {base.name!r} is not known: it must "
            "take one tensor, and be called on a batch once. "
            f"Received: a model built with {config!r}"
        )
    return tuple(shape[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Classifier:
    """A network, and what turns its logits into the user's own outputs.

    Attributes:
        network: `keras.Model` with the weights of the user's own, without its
            head: outputs [batch, K], or [batch, 1] for two classes.
        head: `"softmax"`, `"log_softmax"` or `"sigmoid"`, or `None`.
    """

    network: keras.Model
    head: str | None

    @classmethod
    def of(cls, base: keras.Model) -> Classifier:
        """Reads a network; of a subclassed one no head can be seen."""
        if not has_graph(base) or len(base.outputs) != 1:
            return cls(base, None)
        output = base.outputs[0]
        # Kept with the model, past Keras's tracking, so that it lives as long.
        seen, found = base.__dict__.get("_keras_rub_classifier", (None, None))
        if found is None or seen is not output:
            logits, head = _without_head(output)
            network = base
            if head is not None:
                network = keras.Model(
                    input_structure(base), logits, name=base.name
                )
            found = cls(network, head)
            base.__dict__["_keras_rub_classifier"] = (output, found)
        return found

    def logits(self, features: tf.Tensor) -> tf.Tensor:
        """Inference-mode logits [batch, K] for features [batch, *features]."""
        return to_classes(outputs_of(self.network, features))

    def outputs(self, raw: tf.Tensor) -> tf.Tensor:
        """The user's own outputs, from those of `network`."""
        return raw if self.head is None else HEADS[self.head](raw)


def logits_of(base: keras.Model, features: tf.Tensor) -> tf.Tensor:
    """Inference-mode logits [batch, K] for features [batch, *features].

    K is at least 2: one output z stands for the logits [0, z].
    """
    return Classifier.of(base).logits(features)


def outputs_of(
    base: keras.Model, features: tf.Tensor | list[tf.Tensor]
) -> tf.Tensor:
    """The user's own outputs, in inference mode.

    Args:
        base: built model.
        features: its input, or a list of several.
    """
    return base(_as_inputs(base, features), training=False)


def _as_inputs(model: keras.Model, features):
    """Features in the structure that the model takes."""
    if not getattr(model, "inputs", None):
        return features
    several = features if isinstance(features, list) else [features]
    return keras.tree.pack_sequence_as(input_structure(model), several)


def to_classes(raw: tf.Tensor) -> tf.Tensor:
    """Outputs [batch, 1] of a network as logits [0, z]; others as they are."""
    if raw.shape[-1] != 1:
        return raw
    return tf.pad(raw, [[0, 0], [1, 0]])


def from_classes(logits: tf.Tensor, width: int | None) -> tf.Tensor:
    """Logits or margins [batch, K] as `width` outputs of a network."""
    return logits[:, 1:] - logits[:, :1] if width == 1 else logits


def has_graph(base: keras.Model) -> bool:
    """Whether the symbolic inputs and outputs of a model are known.

    Those of a built Sequential or Functional model are; a subclassed one that
    was only called has none.
    """
    return bool(getattr(base, "inputs", None)) and bool(
        getattr(base, "outputs", None)
    )


def head_of(base: keras.Model) -> str | None:
    """The head, also of a Sequential model that is not built yet.

    Raises:
        ValueError: if there is one that can't be taken off.
    """
    if has_graph(base):
        return Classifier.of(base).head
    if not isinstance(base, keras.Sequential):
        return None
    for layer in reversed(base.layers):
        if isinstance(layer, keras.Model):
            return head_of(layer)
        if not _is_identity(layer):
            return _head_of_operation(layer, rank=2)
    return None


def width_of(base: keras.Model) -> int | None:
    """The number of outputs; `None` where that is not known yet."""
    if has_graph(base):
        return base.outputs[0].shape[-1]
    if not isinstance(base, keras.Sequential):
        return None
    for layer in reversed(base.layers):
        if isinstance(layer, keras.Model):
            return width_of(layer)
        if isinstance(layer, keras.layers.Dense):
            return layer.units
        if not isinstance(layer, _ELEMENTWISE):
            return None
    return None


def layers_of(base: keras.Model) -> list[keras.layers.Layer]:
    """All layers, those of nested models among them."""
    found = []
    for layer in base.layers:
        nested = isinstance(layer, keras.Model)
        found += layers_of(layer) if nested else [layer]
    return found


def nodes_in_order(model: keras.Model) -> list[Any]:
    """Every call of a layer between the model's inputs and its output."""
    ends = {id(tensor) for tensor in model.inputs}
    order, seen = [], set()
    # Each entry is visited twice: to push its parents, then to be listed.
    stack = [(model.outputs[0], False)]
    while stack:
        tensor, ready = stack.pop()
        if id(tensor) in ends:
            continue
        _, node = _origin(tensor)
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((tensor, True))
            stack.extend((parent, False) for parent in node.input_tensors)
    return order


class WithoutActivation(keras.layers.Layer):
    """A layer as if it had been made with `activation=None`.

    It is never saved: the user's own model is.

    Args:
        layer: a built layer; its weights are read, none are made.
    """

    def __init__(self, layer: keras.layers.Layer):
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        self.layer = layer
        self.linear = _Linear(layer)

    def call(self, inputs):
        return type(self.layer).call(self.linear, inputs)


class _Linear:
    """All attributes of a layer but its activation."""

    activation = staticmethod(keras.activations.linear)

    def __init__(self, layer):
        self._layer = layer

    def __getattr__(self, name):
        return getattr(self._layer, name)


def _without_head(tensor) -> tuple[Any, str | None]:
    """The tensor before the head that made this one, and the head."""
    operation, node = _origin(tensor)
    if isinstance(operation, keras.Model):
        inner = Classifier.of(operation)
        if inner.head is None:
            return tensor, None
        arguments = node.arguments
        return inner.network(*arguments.args, **arguments.kwargs), inner.head
    if not node.input_tensors:
        return tensor, None
    before = node.input_tensors[0]
    if _is_identity(operation):
        found, head = _without_head(before)
        return (tensor, None) if head is None else (found, head)
    if isinstance(operation, (keras.layers.Flatten, keras.layers.Reshape)):
        # A convolution whose last image has one pixel.
        found, head = _without_head(before)
        if head is None or (
            head != "sigmoid" and not _same_rows(before, tensor)
        ):
            return tensor, None
        return keras.layers.Reshape(tensor.shape[1:])(found), head
    head = _head_of_operation(operation, len(tensor.shape))
    if head is None:
        return tensor, None
    if isinstance(operation, _ACTIVATED):
        return WithoutActivation(operation)(before), head
    return before, head


def _origin(tensor):
    """The operation that made a symbolic tensor, and its node."""
    return operation_of(tensor), node_of(tensor)


def _same_rows(before, after) -> bool:
    """Whether a reshaping only drops axes of length 1."""
    return (
        len(after.shape) == 2
        and after.shape[-1] == before.shape[-1]
        and all(size == 1 for size in before.shape[1:-1])
    )


def _is_identity(operation) -> bool:
    if isinstance(operation, keras.layers.Identity):
        return True
    return (
        isinstance(operation, keras.layers.Activation)
        and operation.activation is keras.activations.linear
    )


def _head_of_operation(operation, rank: int) -> str | None:
    if not isinstance(operation, keras.layers.Layer):
        # An operation of `keras.ops`, or of a user.
        if not type(operation).__module__.startswith("keras."):
            return None
        head = _OPERATIONS.get(type(operation).__name__)
        axis = getattr(operation, "axis", -1)
    elif isinstance(operation, keras.layers.Softmax):
        head, axis = "softmax", operation.axis
    else:
        activation = getattr(operation, "activation", None)
        head, axis = None, -1
        if isinstance(activation, keras.layers.Softmax):
            head, axis = "softmax", activation.axis
        elif callable(activation):
            head = _FUNCTIONS.get(activation)
    if head is None:
        return None
    if head != "sigmoid" and axis not in (-1, rank - 1):
        return None
    if not isinstance(operation, keras.layers.Layer) or _ends_with(operation):
        return head
    raise ValueError(
        f"The {head} of the last layer {operation.name!r} can't be taken off, "
        "because the layer has a `call` of its own: give it no activation and "
        f"add keras.layers.Activation({head!r}) behind it. "
        f"Received: a {type(operation).__name__}"
    )


def _ends_with(layer) -> bool:
    """Whether the layer is known to apply its activation last."""
    known = (keras.layers.Activation, keras.layers.Softmax, *_ACTIVATED)
    return any(
        isinstance(layer, kind) and type(layer).call is kind.call
        for kind in known
    )
