"""Train a robust classifier of handwritten digits, and see what it can prove.

    python examples/quickstart.py

Four networks of the same shape are trained on scikit-learn's digits (8x8
pixels in [0, 1], no download): as usual, with PGD, with aRUB and with RUB. The
table says how many test digits each gets right, how many it still gets right
when an attacker may change the pixels by `rho` in sum, and for how many it can
be proved that no such attacker exists.
"""

import pathlib

import keras
import matplotlib
import numpy as np
from absl import app, flags

import keras_rub
from keras_rub import attacks, datasets, models

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_OUT = flags.DEFINE_string("out", "out/quickstart.png", "Where to draw.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of training.")
_SAMPLES = flags.DEFINE_integer("samples", 360, "Test digits to look at.")

RADII = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)

DEFENCES = {
    "nominal": lambda base: base,
    "PGD": lambda base: keras_rub.PGDModel(base, rho=1.0, norm=1),
    "aRUB": lambda base: keras_rub.ARUBModel(base, rho=1.0, norm=1),
    "RUB": lambda base: keras_rub.RUBModel(base, rho=1.0),
}
COLORS = ("tab:gray", "tab:green", "tab:orange", "tab:blue")


class EpochBar(keras.callbacks.Callback):
    """One progress bar for the whole training."""

    def on_train_begin(self, logs=None):
        self.bar = keras.utils.Progbar(
            self.params["epochs"],
            unit_name="epoch",
            stateful_metrics=["loss", "val_accuracy"],
        )

    def on_epoch_end(self, epoch, logs=None):
        names = ("loss", "val_accuracy")
        self.bar.update(epoch + 1, [(name, logs[name]) for name in names])


def train(name, wrap, data):
    """Trains one network and returns it, without its defence."""
    keras.utils.set_random_seed(0)
    base = models.mlp(data.input_shape, data.num_classes, hidden=(100, 100))
    model = wrap(base)
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [EpochBar()]
    if model is not base:
        # Robust training goes better if the radius grows from 0.
        ramp = keras_rub.callbacks.RhoSchedule(epochs=_EPOCHS.value // 2)
        callbacks.append(ramp)
    print(f"\nTraining: {name}")
    model.fit(
        *data.train,
        validation_data=data.validation,
        epochs=_EPOCHS.value,
        batch_size=64,
        callbacks=callbacks,
        verbose=0,
    )
    return base


def evaluate(name, base, x, y):
    """Attacked and certified accuracy of one network, and attacked digits."""
    # Of five library attacks tried on the nominal network, the strongest.
    attack = attacks.make("apgd-targeted", base, norm=1)
    attacked = attack.sweep(x, y, RADII)
    certified = keras_rub.certify(base, x, y, rho=RADII, decide_only=True)
    rows = [
        (np.mean(attack.predict(points) == y), certificate.certified_accuracy)
        for points, certificate in zip(attacked, certified, strict=True)
    ]
    print(f"  {name}: done")
    return np.array(rows), attacked[-1]


def print_table(results):
    """One row a network and quantity, one column a radius."""
    print("\nL1 radius".ljust(27) + "".join(f"{rho:8g}" for rho in RADII))
    for name, rows in results.items():
        print(f"{name:9s} clean          {rows[0, 0]:8.1%}")
        for column, kind in enumerate(("attacked", "certified")):
            cells = "".join(f"{value:8.1%}" for value in rows[:, column])
            print(f"{'':9s} {kind:15s} {cells}")


def draw(path, results, base, x, attacked, y):
    """The curves, and a few digits with their radii and attacks."""
    figure = plt.figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    axes = left.subplots()
    for (name, rows), color in zip(results.items(), COLORS, strict=True):
        axes.plot(RADII, 100 * rows[:, 0], "o--", color=color, alpha=0.7)
        axes.plot(RADII, 100 * rows[:, 1], "o-", color=color, label=name)
    axes.plot([], [], "k--", label="under attack")
    axes.plot([], [], "k-", label="certified")
    axes.set_xlabel("L1 radius rho (pixels in [0, 1])")
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("What an attacker leaves, and what can be proved")

    clean, now = (
        base.predict(points, verbose=0).argmax(1) for points in (x, attacked)
    )
    chosen = np.flatnonzero((clean == y) & (now != y))[:4]
    radius = keras_rub.certified_radius(base, x[chosen], y[chosen])
    right.suptitle(
        f"RUB network: digits that an attack of rho = {RADII[-1]:g} finds"
    )
    rows = right.subplots(2, 4, squeeze=False)
    for axes in rows.flat:
        axes.axis("off")
    for column, sample in enumerate(chosen):
        for axes, image, title in (
            (rows[0, column], x, f"certified to\n{radius[column]:.2f}"),
            (rows[1, column], attacked, f"{y[sample]} read as {now[sample]}"),
        ):
            image = image[sample]
            axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axes.set_title(title, fontsize=9)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\nPicture: {path}")


def main(argv):
    del argv
    print(
        "Trains four networks, then attacks and certifies each: two to three "
        "minutes on two idle cores, longer beside other work.",
        flush=True,
    )
    data = datasets.load("digits")
    x, y = (part[: _SAMPLES.value] for part in data.test)
    bases = {name: train(name, wrap, data) for name, wrap in DEFENCES.items()}
    print("\nAttacking and certifying the test digits")
    results, attacked = {}, {}
    for name, base in bases.items():
        results[name], attacked[name] = evaluate(name, base, x, y)
    print_table(results)
    draw(_OUT.value, results, bases["RUB"], x, attacked["RUB"], y)


if __name__ == "__main__":
    app.run(main)
