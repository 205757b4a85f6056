"""Certifies small networks on UCI tables by every method, and exactly.

    python tools/exact_table.py --data_dir=DATA

Writes docs/exact.json and the page docs/exact.md. A run that was cut off goes
on where it stopped.
"""

import json
import pathlib
import time

import keras
import numpy as np
from absl import app, flags

import keras_rub
from keras_rub import tables
from keras_rub.files import write_atomically, write_json
from keras_rub.resuming import Parts

_OUT = flags.DEFINE_string("out", "docs", "Where the table goes.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "The data folder.")
_SET = flags.DEFINE_multi_string(
    "set",
    [
        "banknote-authentication",
        "breast-cancer-wisconsin-diagnostic",
        "ionosphere",
        "qsar-biodegradation",
        "seeds",
    ],
    "The data sets.",
)
_ROWS = flags.DEFINE_integer("rows", 40, "Test rows of each set, at most.")
_RHO = flags.DEFINE_float("rho", 1.0, "The radius of the certificates.")
_TRAIN_RHO = flags.DEFINE_float("train_rho", 0.25, "That of the training.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Passes over the training rows.")
_TIME_LIMIT = flags.DEFINE_float("time_limit", 10.0, "Seconds a row, exact.")

NETWORKS = {"1x16": (16,), "2x32": (32, 32)}
METHODS = ("rub", "alpha-rub", "auto", "exact")
HEADER = (
    "data set", "network", "rows", "clean", *METHODS, "attacked",
    "decided", "median s", "longest s",
)  # fmt: skip


def trained(data, widths):
    """A network that RUB has trained."""
    keras.utils.set_random_seed(0)
    base = keras.Sequential(
        [
            keras.Input(data.input_shape),
            *(keras.layers.Dense(width, "relu") for width in widths),
            keras.layers.Dense(data.num_classes),
        ]
    )
    model = keras_rub.RUBModel(base, rho=_TRAIN_RHO.value)
    model.compile(
        keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy"
    )
    model.fit(
        *data.train,
        epochs=_EPOCHS.value,
        verbose=0,
        callbacks=[keras_rub.callbacks.RhoSchedule(epochs=_EPOCHS.value // 2)],
    )
    return model


def measure(name, widths):
    """One row of the table."""
    data = keras_rub.datasets.load(
        name, _DATA_DIR.value, normalization="standard"
    )
    model = trained(data, widths)
    x, y = (part[: _ROWS.value] for part in data.test)
    found = {"rows": len(x)}
    for method in METHODS[:-1]:
        certificate = keras_rub.certify(
            model, x, y, rho=_RHO.value, method=method, decide_only=True
        )
        found[method] = certificate.certified_accuracy
        found["clean"] = certificate.clean_accuracy
    seconds, certified, decided = [], [], []
    for row in range(len(x)):
        start = time.monotonic()
        certificate = keras_rub.certify(
            model,
            x[row : row + 1],
            y[row : row + 1],
            rho=_RHO.value,
            method="exact",
            decide_only=True,
            time_limit=_TIME_LIMIT.value,
        )
        seconds.append(time.monotonic() - start)
        certified.append(certificate.certified[0])
        decided.append(not certificate.undecided[0])
    strong = keras_rub.attacks.Suite(model, norm=1)
    attacked = strong(x, y, _RHO.value)
    stands = model.predict(attacked, verbose=0).argmax(axis=-1) == y
    # The first row waits for what is compiled.
    return {
        **found,
        "exact": float(np.mean(certified)),
        "attacked": float(np.mean(stands)),
        "decided": float(np.mean(decided)),
        "median s": float(np.median(seconds)),
        "longest s": float(np.max(seconds[1:])),
    }


def page(state):
    """The page of what was measured."""
    settings, rows = state["settings"], []
    for name, found in state["done"].items():
        data, network = name.split()
        shares = ("clean", *METHODS, "attacked", "decided")
        cells = {key: tables.percent(found[key]) for key in shares}
        for key in ("median s", "longest s"):
            cells[key] = f"{found[key]:.2f}"
        cells.update({"data set": data, "network": network})
        cells["rows"] = found["rows"]
        rows.append([cells[key] for key in HEADER])
    flags_ = " ".join(
        f"--{key}={value}"
        for key, value in settings.items()
        if not isinstance(value, list)
    )
    count = sum(found["rows"] for found in state["done"].values())
    decided = sum(
        round(found["rows"] * found["decided"])
        for found in state["done"].values()
    )
    return f"""# Exact certificates of small tables

Made by `python tools/exact_table.py {flags_}`.

Up to {settings["rows"]} test rows of UCI tables in standard deviations, and
networks that RUB trained with L1 and the radius {settings["train_rho"]:g};
1x16 is one hidden layer of 16 neurons. Certified with L1 and the radius
{settings["rho"]:g}. The columns are shares of the rows: classified right
(clean), certified by each method, and still right under the strong attacks
(attacked). What a bound lacks to `exact` is its looseness. Where `exact` and
`attacked` meet, nothing is left between them; where they do not, the attacks
missed something, because `exact` broke the row, or it was not decided.

`decided` is the share of rows that `exact` certified or broke within
{settings["time_limit"]:g} seconds a row: {decided} of {count} rows in all. The
seconds are those of a whole call for one row, which runs the bounds first, on
one core that other work shared. The first row of a network, which waits for
what is compiled, is not among the longest.

{tables.to_markdown(HEADER, rows)}
"""


def main(_):
    out = pathlib.Path(_OUT.value)
    settings = {
        "rows": _ROWS.value,
        "rho": _RHO.value,
        "train_rho": _TRAIN_RHO.value,
        "epochs": _EPOCHS.value,
        "time_limit": _TIME_LIMIT.value,
        "set": _SET.value,
    }
    parts = Parts(out / "exact.json", settings)
    parts.work_off(
        {
            f"{name} {network}": lambda name=name, widths=widths: measure(
                name, widths
            )
            for name in _SET.value
            for network, widths in NETWORKS.items()
        }
    )
    state = {"settings": settings, "done": parts.done}
    write_json(out / "exact.json", state, indent=1)
    write_atomically(out / "exact.md", page(json.loads(json.dumps(state))))


if __name__ == "__main__":
    app.run(main)
