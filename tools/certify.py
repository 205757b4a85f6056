"""Certifies a trained model on a data set, at several radii.

    python tools/certify.py --model out/rub/model.keras --dataset digits \
        --rho 0.25,0.5,1 --out out/certify

Prints one table and writes results.json, results.csv and certified.png to
--out. An interrupted run goes on where it stopped when it is given again;
other settings for the same folder are refused.
"""

import csv
import io
import json
import pathlib
import time

import matplotlib
import numpy as np
from absl import app, flags
from keras_rub.bounds.engine import METHODS

import keras_rub
from keras_rub import datasets
from keras_rub.files import digest, write_atomically
from keras_rub.loading import load_model

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file or a SavedModel folder of keras_rub.export."
)
_DATASET = flags.DEFINE_string("dataset", "digits", "Name of the data set.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_RHO = flags.DEFINE_list("rho", ["0.1", "0.5", "1"], "Radii, with commas.")
_NORM = flags.DEFINE_enum("norm", "1", ["1", "2", "inf"], "The norm.")
_METHOD = flags.DEFINE_list(
    "method", ["auto"], "One or more of auto, rub, alpha-rub, crown, coap."
)
_INPUT_RANGE = flags.DEFINE_bool(
    "input_range",
    False,
    "Hold the attacker to the data set's valid range, such as [0, 1].",
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 1000, "How many test samples, from the first.", lower_bound=1
)
_OUT = flags.DEFINE_string("out", "out/certify", "Folder for the results.")

_CHUNK = 256  # samples between two savings


def settings(path: pathlib.Path) -> dict:
    """Everything that decides the figures."""
    return {
        "model_sha256": digest(path),
        "dataset": _DATASET.value,
        "norm": _NORM.value,
        "methods": _METHOD.value,
        "input_range": _INPUT_RANGE.value,
        "rho": [float(rho) for rho in _RHO.value],
        "samples": _SAMPLES.value,
    }


def resume(path: pathlib.Path, config: dict) -> dict:
    """The state of an earlier run of the same settings, or a new one."""
    if not path.exists():
        return {"settings": config, "done": {}}
    state = json.loads(path.read_text())
    if state["settings"] != config:
        changed = sorted(
            key for key in config if state["settings"].get(key) != config[key]
        )
        raise app.UsageError(
            f"{path.parent} holds the results of another run: "
            f"{', '.join(changed)} differ. Choose another --out."
        )
    return state


def run(model, x, y, state, path, input_range):
    """Certifies chunk by chunk, saving after each."""
    config = state["settings"]
    norm = config["norm"] if config["norm"] == "inf" else int(config["norm"])
    jobs = [
        (method, first)
        for method in config["methods"]
        for first in range(0, len(x), _CHUNK)
    ]
    left = [job for job in jobs if f"{job[0]}:{job[1]}" not in state["done"]]
    if len(left) < len(jobs):
        print(f"resuming: {len(jobs) - len(left)} of {len(jobs)} parts done")
    start = time.monotonic()
    for number, (method, first) in enumerate(left):
        some = slice(first, first + _CHUNK)
        table = keras_rub.certify(
            model,
            x[some],
            y[some],
            rho=config["rho"],
            norm=norm,
            method=method,
            input_range=input_range,
            decide_only=True,
            verbose=0,
        )
        state["done"][f"{method}:{first}"] = {
            "correct": (table[0].predicted == table[0].labels).tolist(),
            "certified": [c.certified.tolist() for c in table],
        }
        write_atomically(path, json.dumps(state))
        spent = time.monotonic() - start
        eta = spent / (number + 1) * (len(left) - number - 1)
        print(
            f"{method}: {min(first + _CHUNK, len(x))}/{len(x)} samples, "
            f"{eta:.0f} s left",
            flush=True,
        )


def collect(state, count) -> list[dict]:
    """One row a method: clean accuracy, then certified at each radius."""
    rows = []
    for method in state["settings"]["methods"]:
        parts = [
            state["done"][f"{method}:{first}"]
            for first in range(0, count, _CHUNK)
        ]
        correct = np.concatenate([part["correct"] for part in parts])
        certified = np.concatenate(
            [np.array(part["certified"]) for part in parts], axis=1
        )
        rows.append(
            {
                "method": method,
                "clean": float(correct.mean()),
                **{
                    f"{rho:g}": float(share)
                    for rho, share in zip(
                        state["settings"]["rho"],
                        certified.mean(axis=1),
                        strict=True,
                    )
                },
            }
        )
    return rows


def report(rows, config, folder):
    """Prints the table, and writes it as CSV and as a picture."""
    header = list(rows[0])
    print(f"\nCertified accuracy, L{config['norm']} ball, {_DATASET.value}")
    print("".join(f"{name:>11s}" for name in header))
    for row in rows:
        print(
            f"{row['method']:>11s}"
            + "".join(f"{row[name]:11.2%}" for name in header[1:])
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, header)
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / "results.csv", text.getvalue())

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    radii = [0.0, *config["rho"]]
    for row in rows:
        shares = [row["clean"], *(row[f"{rho:g}"] for rho in config["rho"])]
        axes.plot(radii, 100 * np.array(shares), "o-", label=row["method"])
    axes.set_xlabel(f"radius rho, L{config['norm']} norm, model's input units")
    axes.set_ylabel("certified accuracy, %")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{config['dataset']}, {config['samples']} test samples")
    figure.savefig(folder / "certified.png", dpi=130)


def main(argv):
    del argv
    if not _MODEL.value or not pathlib.Path(_MODEL.value).exists():
        raise app.UsageError(
            "--model must name a .keras file or a SavedModel folder. "
            f"Received: {_MODEL.value}"
        )
    try:
        [float(rho) for rho in _RHO.value]
    except ValueError:
        raise app.UsageError(
            f"--rho must be numbers with commas between. Received: {_RHO.value}"
        ) from None
    unknown = set(_METHOD.value) - set(METHODS)
    if unknown:
        raise app.UsageError(
            f"--method knows {METHODS}. Received: {sorted(unknown)}"
        )
    folder = pathlib.Path(_OUT.value)
    config = settings(pathlib.Path(_MODEL.value))
    state = resume(folder / "results.json", config)
    try:
        model = load_model(_MODEL.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    data = datasets.load(_DATASET.value, _DATA_DIR.value)
    x, y = (part[: _SAMPLES.value] for part in data.test)
    x = x.reshape(len(x), *model.input_shape[1:])
    if _INPUT_RANGE.value and data.input_range is None:
        raise app.UsageError(
            f"--input_range: data set {_DATASET.value} has no valid range."
        )
    input_range = data.input_range if _INPUT_RANGE.value else None
    try:
        run(model, x, y, state, folder / "results.json", input_range)
    except keras_rub.UnsupportedLayerError as error:
        raise app.UsageError(str(error)) from error
    report(collect(state, len(x)), config, folder)
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    app.run(main)
