"""Reading a saved classifier back, whatever it was saved as."""

from __future__ import annotations

import os
import pathlib

import keras
import tensorflow as tf

# Where `keras_rub.export` keeps the Keras model within a SavedModel.
KERAS_COPY = pathlib.Path("assets.extra") / "model.keras"


def load_model(path: str | os.PathLike) -> keras.Model:
    """Loads a `.keras` file or a SavedModel folder as a Keras model.

    A SavedModel that `keras_rub.export` wrote comes back with its layers. Any
    other one comes back as a single layer around its `serving_default`
    signature: it can be attacked, but no longer certified.

    Args:
        path: a `.keras` file, the folder of a SavedModel, or a folder with
            numbered versions of one, of which the newest is taken.

    Returns:
        A built Keras model with one input and one output.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"There is no model at {path}.")
    if path.is_file():
        if path.suffix not in (".keras", ".h5"):
            raise ValueError(
                f"{path} is neither a .keras file nor a SavedModel folder."
            )
        return _load_keras(path)
    folder = _newest_version(path)
    if (folder / KERAS_COPY).exists():
        return _load_keras(folder / KERAS_COPY)
    return _around_signature(folder)


def _load_keras(path: pathlib.Path) -> keras.Model:
    try:
        return keras.models.load_model(path)
    except Exception as error:  # many kinds, for many kinds of broken files
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} holds no Keras model: {reason}") from error


def _newest_version(path: pathlib.Path) -> pathlib.Path:
    if (path / "saved_model.pb").exists():
        return path
    versions = [
        child
        for child in path.iterdir()
        if child.name.isdigit() and (child / "saved_model.pb").exists()
    ]
    if not versions:
        raise ValueError(f"{path} holds no SavedModel (no saved_model.pb).")
    return max(versions, key=lambda child: int(child.name))


def _around_signature(folder: pathlib.Path) -> keras.Model:
    loaded = tf.saved_model.load(str(folder))
    signature = loaded.signatures.get("serving_default")
    if signature is None:
        raise ValueError(
            f"{folder} has no signature serving_default. "
            f"Received: signatures {sorted(loaded.signatures)}"
        )
    inputs = signature.structured_input_signature[1]
    outputs = signature.structured_outputs
    if len(inputs) != 1 or ("logits" not in outputs and len(outputs) != 1):
        raise ValueError(
            f"{folder}: serving_default must take one tensor and return one, "
            f"or name one `logits`. Received: inputs {sorted(inputs)}, "
            f"outputs {sorted(outputs)}"
        )
    (spec,) = inputs.values()
    layer = keras.layers.TFSMLayer(
        str(folder), call_endpoint="serving_default", name="saved_model"
    )
    x = keras.Input(tuple(spec.shape[1:]), dtype=spec.dtype.name)
    found = layer(x)
    if isinstance(found, dict):
        found = found["logits" if "logits" in outputs else next(iter(outputs))]
    return keras.Model(x, found, name=folder.name)
