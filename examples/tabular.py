"""Certify a diagnosis from a table where some features can't be changed.

    python examples/tabular.py

The data are scikit-learn's breast cancer measurements: 30 features of cell
nuclei, standardised, two classes. The size of the nuclei is taken as measured
beyond doubt (`mask`), and the "error" columns as twice as hard to falsify as
the others (`weights`). A network is trained with RUB against such an
attacker. The output says how far each patient's diagnosis can be trusted, and
which features an attacker would use.
"""

import pathlib

import keras
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

import keras_rub
from keras_rub import attacks, datasets, models

_OUT = flags.DEFINE_string("out", "out/tabular.png", "Where to draw.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of training.")
_SAMPLES = flags.DEFINE_integer("samples", 114, "Test patients to look at.")
_RHO = flags.DEFINE_float("rho", 1.0, "L1 radius, in standard deviations.")
_METHOD = flags.DEFINE_string("method", "auto", "The bound to certify by.")

CLASSES = ("malignant", "benign")
IMMUTABLE = ("radius", "perimeter", "area")


def attacker(names):
    """What the attacker may change, and at which cost."""
    return {
        "mask": [not any(size in name for size in IMMUTABLE) for name in names],
        "weights": [2.0 if name.endswith("error") else 1.0 for name in names],
    }


def train(data, limits):
    """A network trained against this attacker."""
    keras.utils.set_random_seed(0)
    base = models.mlp(data.input_shape, data.num_classes, hidden=(50, 50))
    model = keras_rub.RUBModel(base, rho=_RHO.value, **limits)
    model.compile("adam", "sparse_categorical_crossentropy")
    ramp = keras_rub.callbacks.RhoSchedule(epochs=max(_EPOCHS.value // 2, 1))
    model.fit(
        *data.train,
        epochs=_EPOCHS.value,
        batch_size=32,
        callbacks=[ramp],
        verbose=0,
    )
    return model


def least_changes(model, x, y, radius, limits):
    """For each patient the smallest change found that flips the diagnosis."""
    attack = attacks.make("apgd-ce", model, norm=1, **limits)
    # The certificate says where no attack can win, so start from there.
    changes = np.full(x.shape, np.nan, "float32")
    for factor in np.geomspace(1.0, 5.0, 9):
        left = np.flatnonzero(np.isnan(changes[:, 0]) & (radius > 0))
        if not len(left):
            break
        points = attack(x[left], y[left], rho=factor * radius[left])
        won = attack.predict(points) != y[left]
        changes[left[won]] = (points - x[left])[won]
    return changes


def draw(path, data, y, radius, cost, share):
    """Certified radius and cheapest attack by patient, and the features."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    patients, features = figure.subplots(1, 2, width_ratios=(1.3, 1))
    order = np.argsort(radius)
    place = np.arange(len(y))
    for number, color in enumerate(("tab:red", "tab:blue")):
        own = y[order] == number
        label = f"{CLASSES[number]}: certified radius"
        patients.plot(
            place[own], radius[order][own], "o", ms=4, color=color, label=label
        )
    patients.plot(
        place, cost[order], "kx", ms=3, label="an attack of this size flips it"
    )
    patients.set_yscale("log")
    patients.grid(alpha=0.3)
    patients.set_xlabel("test patients, in order of their certified radius")
    patients.set_ylabel("weighted L1 radius, standard deviations")
    patients.legend(fontsize=8)
    patients.set_title("How far each diagnosis can be trusted")

    top = np.argsort(-share)[:10][::-1]
    features.barh([data.feature_names[i] for i in top], 100 * share[top])
    features.set_xlabel("% of the attacker's budget")
    features.set_title("What an attacker would change")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nPicture: {path}")


def main(argv):
    del argv
    data = datasets.load("breast_cancer")
    x, y = (part[: _SAMPLES.value] for part in data.test)
    limits = attacker(data.feature_names)
    model = train(data, limits)
    options = {**limits, "method": _METHOD.value, "verbose": 0}
    print(keras_rub.certify(model, x, y, rho=_RHO.value, **options))

    radius = keras_rub.certified_radius(model, x, y, **options)
    changes = least_changes(model, x, y, radius, limits)
    spent = np.abs(changes) * limits["weights"]
    # Each patient counts the same, however large the change.
    shares = spent / spent.sum(axis=1, keepdims=True)
    share = np.nan_to_num(shares).sum(axis=0)
    share /= max(share.sum(), 1e-9)
    print("\nThe least certain of the patients who are diagnosed right")
    right = np.flatnonzero(radius > 0)
    for patient in right[np.argsort(radius[right])[:5]]:
        line = f"{patient:5d} {CLASSES[y[patient]]:9s} "
        line += f"certified to {radius[patient]:.2f}"
        if not np.isnan(changes[patient, 0]):
            most = int(np.argmax(spent[patient]))
            line += (
                f", misread at {spent[patient].sum():.2f}: mostly "
                f"{data.feature_names[most]} {changes[patient, most]:+.2f}"
            )
        print(line)
    print("\nWhat an attacker would change, in % of the budget")
    for feature in np.argsort(-share)[:5]:
        print(f"  {data.feature_names[feature]:24s}{share[feature]:6.1%}")
    draw(_OUT.value, data, y, radius, spent.sum(axis=1), share)


if __name__ == "__main__":
    app.run(main)
