"""The user's classifier as one function from inputs to logits."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_rub.perturbations import PerturbationSet


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
    # A Functional model keeps the names of its inputs here; a Sequential one
    # that was never called has no such attribute.
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


def logits_of(base: keras.Model, features: tf.Tensor) -> tf.Tensor:
    """Inference-mode outputs [batch, K] for features [batch, *features]."""
    inputs = features
    if getattr(base, "inputs", None):
        inputs = keras.tree.pack_sequence_as(input_structure(base), [features])
    return base(inputs, training=False)


def check_logits(base: keras.Model) -> None:
    """Raises if the last layer turns logits into probabilities."""
    last = _last_layer(base)
    name = getattr(getattr(last, "activation", None), "__name__", "")
    if isinstance(last, keras.layers.Softmax):
        name = "softmax"
    if name in ("softmax", "sigmoid", "log_softmax"):
        raise ValueError(
            f"`base` must return logits, but its last layer {last.name!r} "
            f"applies {name}. Remove it and use a loss with "
            "`from_logits=True`; take the softmax of the predictions where "
            "you need probabilities."
        )


def _last_layer(model: keras.Model):
    layers = model.layers
    if not layers:
        return None
    last = layers[-1]
    return _last_layer(last) if isinstance(last, keras.Model) else last
