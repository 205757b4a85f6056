"""Exports a trained model for TensorFlow Serving, with its certificates.

    python tools/export.py --model out/rub/model.keras --out models/digits \
        --input_range 0,1 --report out/report.json

Writes the next version of models/digits, and models/models.config and
models/batching.config for the server. docs/serving.md shows how to start it.
If --model lies in a folder of tools/train.py, the settings of the training
become part of the metadata; --report adds the accuracies that
tools/evaluate.py found.
"""

import json
import pathlib

from absl import app, flags, logging

import keras_rub
from keras_rub import serving
from keras_rub.loading import load_model

_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file or a SavedModel folder of keras_rub.export."
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder of all versions, such as models/digits."
)
_VERSION = flags.DEFINE_integer(
    "version", None, "Its number; the next free one by default."
)
_SIGNATURES = flags.DEFINE_list(
    "signatures",
    ["serving_default", "certify", "certified_radius"],
    "What the server shall offer, with commas.",
)
_NORM = flags.DEFINE_enum(
    "norm",
    None,
    ["1", "2", "inf"],
    "Norm of the certificates; by default that of the training, else 1.",
)
_METHOD = flags.DEFINE_enum(
    "method",
    None,
    ["rub", "crown", "coap"],
    "How to certify; by default rub for norm 1, else crown.",
)
_INPUT_RANGE = flags.DEFINE_list(
    "input_range", None, "Lowest and highest valid input, such as 0,1."
)
_REPORT = flags.DEFINE_string(
    "report", None, "The .json file that tools/evaluate.py wrote."
)
_SERVER_CONFIG = flags.DEFINE_bool(
    "server_config",
    True,
    "Write models.config and batching.config to the folder above --out.",
)


def read_range() -> tuple[float, float] | None:
    """The valid range of the flag."""
    if _INPUT_RANGE.value is None:
        return None
    try:
        low, high = map(float, _INPUT_RANGE.value)
    except ValueError:
        raise app.UsageError(
            "--input_range must be two numbers with a comma. "
            f"Received: {','.join(_INPUT_RANGE.value)}"
        ) from None
    return low, high


def read_metadata() -> dict:
    """What is known of the training and of the accuracies."""
    found = {}
    config = pathlib.Path(_MODEL.value).parent / "config.json"
    if config.exists():
        found["training"] = json.loads(config.read_text())
        found["dataset"] = found["training"].get("dataset")
    if _REPORT.value:
        report = pathlib.Path(_REPORT.value)
        if not report.exists():
            raise app.UsageError(f"--report: there is no file {report}.")
        result = keras_rub.Evaluation.from_dict(json.loads(report.read_text()))
        found["accuracy"] = result.rows
    return found


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # TensorFlow's notes on saving
    if not _MODEL.value or not _OUT.value:
        raise app.UsageError("--model and --out are required.")
    try:
        folder = keras_rub.export(
            load_model(_MODEL.value),
            _OUT.value,
            _VERSION.value,
            _SIGNATURES.value,
            norm=_NORM.value,
            method=_METHOD.value,
            input_range=read_range(),
            metadata=read_metadata(),
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(f"written to {folder}")
    print(json.dumps(serving.read_metadata(folder), indent=2))
    if _SERVER_CONFIG.value:
        config = serving.write_config(pathlib.Path(_OUT.value).parent)
        print(f"server configuration in {config}")


if __name__ == "__main__":
    app.run(main)
