"""The user's classifier as one function from inputs to logits."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_rub.uncertainty import PerturbationSet


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


def logits_of(base: keras.Model, features: tf.Tensor) -> tf.Tensor:
    """Inference-mode outputs [batch, K] for features [batch, *features]."""
    inputs = features
    if getattr(base, "inputs", None):
        inputs = keras.tree.pack_sequence_as(input_structure(base), [features])
    return base(inputs, training=False)
