r"""Exports a trained network for TensorFlow Serving, with its certificates.

    keras-rub export --model out/rub/model.keras --out models/digits \
        --report out/report.json

Writes the next version of models/digits, and models/models.config and
models/batching.config for the server. docs/serving.md shows how to start it.
Norm and valid range are those of the training, unless a flag says otherwise.
The settings of the training become part of the metadata; --report adds the
accuracies that evaluate found.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

import keras_rub
from keras_rub import serving
from keras_rub.bounds import methods
from keras_rub.cli import command, saved_run, shared
from keras_rub.files import read_json

FLAGS = command.Flags()

_MODEL = shared.define_model(FLAGS)
_OUT = shared.define_out(
    FLAGS, None, "Folder of all versions, such as models/digits."
)
flags.mark_flag_as_required("out", flag_values=FLAGS)
_VERSION = FLAGS.whole(
    "version", None, "Its number; the next free one by default."
)
_SIGNATURES = FLAGS.words(
    "signatures",
    "serving_default,certify,certified_radius",
    "What the server shall offer, with commas.",
)
_DATA = shared.DataFlags(FLAGS)
_NORM = shared.define_norm(FLAGS)
_METHOD = FLAGS.choice(
    "method",
    None,
    methods.names(in_graph=True),
    "How to certify; by default rub for norm 1, else crown.",
)
_INPUT_RANGE = shared.define_range(FLAGS)
_TOLERANCE = FLAGS.number(
    "tolerance",
    0.01,
    "How close a certified radius is to one that fails, as a fraction of it.",
)
_MAX_RADIUS = FLAGS.number(
    "max_radius", 1e3, "Where the search for a certified radius ends."
)
_MAX_BATCH_SIZE = FLAGS.whole(
    "max_batch_size",
    1024,
    "The most samples that one request for certificates may hold.",
)
_REPORT = FLAGS.string(
    "report", None, "The report of evaluate, its .json file."
)
_SERVER_CONFIG = FLAGS.switch(
    "server_config",
    True,
    "Write models.config and batching.config to the folder above --out.",
)


def run() -> None:
    """Exports as the flags say."""
    logging.set_verbosity(logging.WARNING)  # TensorFlow's notes on saving
    saved = saved_run.SavedRun.load(_MODEL.value)
    _DATA.check(saved.settings)
    data = None
    # The attacker of a network that has none of its own is that of its table.
    unknown = saved.attacker is None and "columns" in saved.settings
    if (
        _INPUT_RANGE.value == "data"
        or _DATA.name
        or _DATA.normalization
        or unknown
    ):
        data = _DATA.load(saved.settings)
    (attacker,) = shared.attackers(
        saved, [_NORM.value] if _NORM.value else None, _INPUT_RANGE.value, data
    )
    metadata = _metadata(saved.settings, data)
    print(f"attacker: {attacker}")
    print(f"radius in units of: {metadata.get('units', 'the model input')}")
    folder = keras_rub.export(
        saved.model,
        _OUT.value,
        _VERSION.value,
        _SIGNATURES.value,
        method=_METHOD.value,
        metadata=metadata,
        perturbations=attacker,
        tolerance=_TOLERANCE.value,
        max_radius=_MAX_RADIUS.value,
        max_batch_size=_MAX_BATCH_SIZE.value,
    )
    print(f"written to {folder}")
    print(json.dumps(serving.read_metadata(folder), indent=2))
    if _SERVER_CONFIG.value:
        config = serving.write_config(pathlib.Path(_OUT.value).parent)
        print(f"server configuration in {config}")


def _metadata(settings, data) -> dict[str, Any]:
    """What is known of the training and of the accuracies."""
    found: dict[str, Any] = {}
    if settings:
        found["training"] = settings
    for key in ("dataset", "normalization", "units", "class_names", "columns"):
        if key in settings:
            found[key] = settings[key]
    if data is not None:
        found.update(data.metadata)
    if _REPORT.value:
        state = read_json(_REPORT.value)
        try:
            found["accuracy"] = keras_rub.Evaluation.from_dict(state).rows
        except ValueError as error:
            raise ValueError(
                "--report must be a .json file that evaluate wrote. "
                f"Received: {_REPORT.value}"
            ) from error
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("export", FLAGS, run, argv, about=__doc__)
