"""A trained network as the commands take it: with what its training knew."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
from typing import Any

import keras
import numpy as np

import keras_rub
from keras_rub import serving, training
from keras_rub.loading import load_model


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A model with the settings of its training.

    Attributes:
        path: what the model was loaded from.
        model: the model.
        settings: data set, normalization and recipe of the training; empty
            where nothing is known.
        attacker: whom the model was trained or exported against, or `None`
            where nothing is known.
    """

    path: str
    model: keras.Model
    settings: dict[str, Any]
    attacker: keras_rub.PerturbationSet | None

    @classmethod
    def load(cls, path: str | os.PathLike | None) -> SavedRun:
        """Reads a .keras file or a SavedModel, and what lies beside it."""
        if not path:
            raise ValueError(
                "--model must name a .keras file or a SavedModel folder. "
                "Received: nothing"
            )
        model = load_model(path)
        attacker = getattr(model, "perturbations", None)
        if pathlib.Path(path).is_file():
            return cls(str(path), model, training.read_settings(path), attacker)
        try:
            facts = serving.read_metadata(path)
        except ValueError:  # not of keras_rub.export
            facts = {}
        certificates = facts.get("certificates")
        if certificates is not None:
            names = inspect.signature(keras_rub.PerturbationSet).parameters
            attacker = keras_rub.PerturbationSet.from_config(
                {
                    name: certificates[name]
                    for name in names
                    if name in certificates
                }
            )
        return cls(str(path), model, facts.get("training", {}), attacker)

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Samples in the shape that the model takes."""
        shape = tuple(self.model.input_shape[1:])
        if np.prod(x.shape[1:]) != np.prod(shape):
            raise ValueError(
                f"{self.path} takes inputs of shape {shape}, but those of the "
                f"data set have {x.shape[1:]}."
            )
        return x.reshape(len(x), *shape)
