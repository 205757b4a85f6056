"""Compares CROWN with auto_LiRPA's, on the same networks and images.

    python tools/compare_auto_lirpa.py --python OTHER/bin/python

OTHER is a virtual environment that has torch, NumPy and auto_LiRPA: they need
other versions of packages than this library. Prints certified shares, how much
larger our margins are, and milliseconds a sample of both, one after the other.
"""

import functools
import importlib.metadata
import json
import pathlib
import subprocess
import tempfile
import time

import keras
import numpy as np
from absl import app, flags
from keras import layers

import keras_rub
from keras_rub import datasets, models, tables
from keras_rub.files import write_json

_PYTHON = flags.DEFINE_string(
    "python", None, "The interpreter that has auto_LiRPA.", required=True
)
_OUT = flags.DEFINE_string(
    "out", "docs/results/auto_lirpa.json", "Where to write the figures."
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder with mnist.npz.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "How many times each case is measured.", lower_bound=1
)
_BATCH = flags.DEFINE_integer("batch", 64, "Samples that are bounded together.")

_SIDE = pathlib.Path(__file__).with_name("auto_lirpa_side.py")


def smooth(activation):
    """Two hidden layers of 100."""
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(100, activation),
            layers.Dense(100, activation),
            layers.Dense(10),
        ]
    )


# Network, radius (Linf), images.
CASES = {
    "small_cnn": (lambda: models.small_cnn((28, 28, 1), 10), 0.02, 128),
    "mlp": (lambda: models.mlp((28, 28, 1), 10), 0.01, 512),
    "tanh": (lambda: smooth("tanh"), 0.01, 512),
    "sigmoid": (lambda: smooth("sigmoid"), 0.01, 512),
}


def trained(make, data):
    """A network after one epoch of plain training."""
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(*data.train, epochs=1, batch_size=128, verbose=0)
    return model


def written_down(model):
    """The layers of a Sequential model, for another library."""
    found = []
    for layer in model.layers:
        if isinstance(layer, layers.Flatten):
            found.append({"kind": "flatten"})
            continue
        entry = {"activation": keras.activations.serialize(layer.activation)}
        if isinstance(layer, layers.Conv2D):
            size, step = layer.kernel_size[0], layer.strides[0]
            missing = (layer.output.shape[1] - 1) * step + size
            missing -= layer.input.shape[1]
            entry |= {"kind": "conv", "strides": step, "padding": missing // 2}
        else:
            entry["kind"] = "dense"
        found.append(entry)
    return found


def timed(run, rounds, count):
    """What a function returns, and its median milliseconds a sample."""
    found, times = run(), []
    for _ in range(rounds):
        start = time.perf_counter()
        found = run()
        times.append((time.perf_counter() - start) / count * 1e3)
    return found, float(np.median(times))


def ask_the_other(networks, folder):
    """Margins [n, K] and milliseconds of auto_LiRPA, by name."""
    cases = {}
    for name, (model, x, y) in networks.items():
        weights = {f"w{i}": w for i, w in enumerate(model.get_weights())}
        np.savez(folder / f"{name}.npz", x=x, y=y, **weights)
        cases[name] = {
            "layers": written_down(model),
            "rho": CASES[name][1],
            "classes": 10,
            "batch": _BATCH.value,
            "rounds": _ROUNDS.value,
        }
    (folder / "cases.json").write_text(json.dumps(cases))
    subprocess.run([_PYTHON.value, str(_SIDE), str(folder)], check=True)
    return dict(np.load(folder / "answers.npz"))


def main(_):
    data = datasets.load("mnist", _DATA_DIR.value)
    networks = {}
    for name, (make, _, count) in CASES.items():
        x, y = (part[:count] for part in data.test)
        networks[name] = trained(make, data), x.astype("float32"), y
    with tempfile.TemporaryDirectory() as folder:
        other = ask_the_other(networks, pathlib.Path(folder))
    rows, cells = {}, []
    for name, (model, x, y) in networks.items():
        certify = functools.partial(
            keras_rub.certify, model, x, y, rho=CASES[name][1], norm="inf",
            method="crown", batch_size=_BATCH.value, verbose=0,
        )  # fmt: skip
        found, ms = timed(certify, _ROUNDS.value, len(x))
        np.testing.assert_allclose(
            other[f"{name}/logits"],
            model.predict(x[: _BATCH.value], verbose=0),
            atol=1e-3,
        )
        margins = other[f"{name}/margins"]
        others = np.arange(10) != y[:, None]
        certified = np.all((margins < 0) | ~others, axis=1)
        gaps = (found.margins - margins)[others]
        rows[name] = {
            "rho": CASES[name][1],
            "samples": len(x),
            "certified": found.certified_accuracy,
            "certified_auto_lirpa": float(certified.mean()),
            "largest_gap": float(gaps.max()),
            "mean_gap": float(gaps.mean()),
            "ms": round(ms, 2),
            "ms_auto_lirpa": round(float(other[f"{name}/ms"]), 2),
        }
        cells.append([str(value) for value in (name, *rows[name].values())])
    versions = {
        "torch": str(other["torch"]),
        "tensorflow": importlib.metadata.version("tensorflow"),
    }
    write_json(_OUT.value, {"cases": rows, "versions": versions})
    print(tables.to_text(["network", *next(iter(rows.values()))], cells))


if __name__ == "__main__":
    app.run(main)
