"""Files for TensorFlow Serving: warm-up requests and configuration."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_rub.files import write_atomically
from keras_rub.serving.metadata import read_metadata
from keras_rub.serving.versions import list_versions

# Where a server looks for them within a SavedModel.
WARMUP = pathlib.Path("assets.extra") / "tf_serving_warmup_requests"

# The most samples of one request, where an export does not say otherwise. A
# larger request is refused.
MAX_BATCH_SIZE = 1024

_BATCHING = """\
max_batch_size { value: %d }
batch_timeout_micros { value: 1000 }
max_enqueued_batches { value: 1000 }
num_batch_threads { value: %d }
"""


def can_write_warmup() -> bool:
    """Whether the extra `serving` (tensorflow-serving-api) is installed."""
    return importlib.util.find_spec("tensorflow_serving") is not None


def write_warmup(
    folder: pathlib.Path,
    name: str,
    requests: Mapping[str, Mapping[str, np.ndarray]],
) -> None:
    """Writes requests that a server runs before it says it is ready.

    Args:
        folder: the SavedModel.
        name: the name of the model on the server.
        requests: the inputs of each signature, by name.
    """
    from tensorflow_serving.apis import prediction_log_pb2

    with tf.io.TFRecordWriter(str(folder / WARMUP)) as writer:
        for signature, inputs in requests.items():
            log = prediction_log_pb2.PredictionLog()
            request = log.predict_log.request
            request.model_spec.name = name
            request.model_spec.signature_name = signature
            for key, value in inputs.items():
                request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
            writer.write(log.SerializeToString())


def write_config(
    folder: str | os.PathLike,
    mounted_at: str | os.PathLike = "/models",
    threads: int | None = None,
) -> pathlib.Path:
    """Writes models.config and batching.config for all models of a folder.

    Args:
        folder: the folder that holds one folder a model, each with numbered
            versions, as `keras_rub.export` writes them.
        mounted_at: where the server sees this folder. Defaults to
            `"/models"`, as the Docker commands of docs/serving.md mount it.
        threads: int, or `None`. Batches that are worked on at the same
            time. Defaults to `None`, the number of cores.

    Returns:
        The path of models.config.

    Example:
    ```python
    keras_rub.export(model, "models/digits")
    keras_rub.serving.write_config("models")
    ```
    """
    folder = pathlib.Path(folder)
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [child.name for child in children if list_versions(child)]
    if not names:
        raise ValueError(
            "`folder` must hold folders with numbered versions of a model. "
            f"Received: `folder={str(folder)!r}`"
        )
    entries = "".join(
        "  config {\n"
        f"    name: {_quoted(name)}\n"
        f"    base_path: {_quoted(pathlib.PurePosixPath(mounted_at) / name)}\n"
        '    model_platform: "tensorflow"\n'
        "  }\n"
        for name in names
    )
    path = folder / "models.config"
    size = min(_max_batch_size(folder / name) for name in names)
    write_atomically(
        folder / "batching.config",
        _BATCHING % (size, threads or os.cpu_count() or 1),
    )
    write_atomically(path, f"model_config_list {{\n{entries}}}\n")
    return path


def _max_batch_size(folder: pathlib.Path) -> int:
    """What the newest version takes; others than ours have no limit."""
    try:
        certificates = read_metadata(folder).get("certificates") or {}
        return int(certificates["max_batch_size"])
    except (ValueError, TypeError, KeyError):
        return MAX_BATCH_SIZE


def _quoted(text) -> str:
    """A string of a text protocol buffer."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
