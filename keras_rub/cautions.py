"""Warnings about models whose certificates or radii mislead."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_rub.classifier import input_shape, layers_of
from keras_rub.perturbations import PerturbationSet

# A column counts as nearly constant where one radius is so many times as many
# standard deviations as in the others.
_FAR = 1e3
_TINY = 1e-6

_SHOWN = 10  # columns that a warning names


def about_precision(base: keras.Model) -> None:
    """Warns if the network does not compute in float32."""
    found = sorted(
        {
            layer.compute_dtype
            for layer in layers_of(base)
            if layer.compute_dtype in ("float16", "bfloat16")
        }
    )
    if not found:
        return
    warnings.warn(
        f"Model {base.name!r} computes in {' and '.join(found)}, but the "
        "certificate is about its weights in float32, and rounding can change "
        "a prediction. Compare `model.predict(x)` with the certificate's "
        "`predicted` to see how often, and run the model in float32 where the "
        "certificate must hold.",
        stacklevel=3,
    )


def about_scale(base: keras.Model, perturbations: PerturbationSet) -> None:
    """Warns if Normalization blows up columns that hardly vary."""
    if not tf.executing_eagerly():
        return  # no values to look at
    for layer in layers_of(base):
        if not isinstance(layer, keras.layers.Normalization):
            continue
        variance = getattr(layer, "variance", None)
        if variance is None:
            continue  # not adapted yet
        deviation = np.sqrt(np.asarray(variance, "float64")).reshape(-1)
        reach = np.ones_like(deviation)
        if len(getattr(base, "inputs", None) or ()) == 1:
            shape = input_shape(base)
            if shape == deviation.shape:
                reach = perturbations.reach(shape)
        columns = np.flatnonzero(_far_apart(deviation, reach))
        if len(columns):
            named = ", ".join(map(str, columns[:_SHOWN]))
            more = ", ..." if len(columns) > _SHOWN else ""
            warnings.warn(
                f"Normalization layer {layer.name!r} divides the nearly "
                f"constant columns [{named}{more}] by almost 0, so that a "
                "radius that is small elsewhere is huge there and nothing "
                "can be robust: drop these columns, or fix them with `mask` "
                "or `weights`.",
                stacklevel=3,
            )


def _far_apart(deviation, reach) -> np.ndarray:
    """Which columns a radius moves by far more deviations than the others."""
    tiny = deviation < _TINY
    moves = reach / np.maximum(deviation, keras.config.epsilon())
    usual = moves[~tiny & (reach > 0)]
    if not len(usual):
        return tiny & (reach > 0)
    return moves > _FAR * np.median(usual)
