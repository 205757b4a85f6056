"""Compare all defences on digits: accuracy, what is proved, and the cost.

    python examples/compare_defences.py

Each network has the same shape, the same number of steps and, but for the
nominal one, the same L1 radius. `attacked` counts a digit as lost if an
adaptive attack finds a wrong class within the radius; `certified` counts those
for which it is proved that no attack can. The truth lies between the two.
"""

import pathlib
import time

import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

import keras_rub
from keras_rub import attacks, datasets
from keras_rub.training import DEFENSES, Recipe

_DEFENSES = flags.DEFINE_list("defenses", list(DEFENSES), "Which ones.")
_RHO = flags.DEFINE_float("rho", 1.0, "L1 radius, pixels in [0, 1].")
_STEPS = flags.DEFINE_integer("steps", 500, "Steps of training.")
_SAMPLES = flags.DEFINE_integer("samples", 200, "Test digits to look at.")
_ARCHITECTURE = flags.DEFINE_enum(
    "architecture", "mlp", ["mlp", "mlp1"], "Three hidden layers, or one."
)
_ATTACK = flags.DEFINE_enum(
    "attack", "apgd-targeted", attacks.NAMES, "The attack to try."
)
# The smallest of several bounds, so that none has a home advantage.
_METHOD = flags.DEFINE_string("method", "auto", "The bound to certify by.")
_OUT = flags.DEFINE_string("out", "out/compare_defences.png", "Where to draw.")

COLUMNS = ("clean", "attacked", "certified")


def measure(defense, data):
    """Clean, attacked and certified accuracy, and seconds of training."""
    recipe = Recipe(
        defense=defense,
        norm=1,
        rho=_RHO.value,
        steps=_STEPS.value,
        batch_size=64,
        architecture=_ARCHITECTURE.value,
    )
    model = recipe.build(data)
    start = time.perf_counter()
    recipe.fit(model, data, verbose=0)
    seconds = time.perf_counter() - start

    x, y = (part[: _SAMPLES.value] for part in data.test)
    attack = attacks.make(_ATTACK.value, model, norm=1)
    attacked = attack.predict(attack(x, y, _RHO.value))
    certificate = keras_rub.certify(
        model,
        x,
        y,
        rho=_RHO.value,
        norm=1,
        method=_METHOD.value,
        decide_only=True,
        verbose=0,
    )
    return (
        np.mean(attack.predict(x) == y),
        np.mean(attacked == y),
        certificate.certified_accuracy,
        seconds,
    )


def draw(path, results):
    """Accuracies and seconds as bars, a group for each defence."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    places = np.arange(len(results))
    values = np.array(list(results.values()))
    colors = ("tab:gray", "tab:orange", "tab:blue")
    for column, (name, color) in enumerate(zip(COLUMNS, colors, strict=True)):
        left.bar(
            places + 0.27 * (column - 1),
            100 * values[:, column],
            width=0.25,
            color=color,
            label=name,
        )
    left.set_ylabel(f"accuracy, %, L1 radius {_RHO.value:g}")
    left.set_ylim(0, 100)
    left.grid(axis="y", alpha=0.3)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    right.bar(places, values[:, 3], color="tab:green")
    right.set_ylabel("seconds of training")
    for axes in (left, right):
        axes.set_xticks(places, list(results), rotation=30)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nPicture: {path}")


def main(argv):
    del argv
    data = datasets.load("digits")
    heads = (*COLUMNS, "seconds")
    print(f"{'':10s}" + "".join(f"{head:>11s}" for head in heads))
    results = {}
    for name in _DEFENSES.value:
        *shares, seconds = results[name] = measure(name, data)
        cells = "".join(f"{share:11.1%}" for share in shares)
        print(f"{name:10s}{cells}{seconds:11.1f}", flush=True)
    draw(_OUT.value, results)


if __name__ == "__main__":
    app.run(main)
