"""Train a robust classifier of handwritten digits, and see what it can prove.

    python examples/quickstart.py

Three networks of the same shape are trained on scikit-learn's digits (8x8
pixels in [0, 1], no download): as usual, with aRUB and with RUB. The table
says how many test digits each gets right, how many it still gets right when
an attacker may change the pixels by `rho` in sum, and for how many it can be
proved that no such attacker exists.
"""

import pathlib

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_rub
from keras_rub import datasets, models

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_OUT = flags.DEFINE_string("out", "out/quickstart.png", "Where to draw.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of training.")
_SAMPLES = flags.DEFINE_integer("samples", 360, "Test digits to look at.")

RADII = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)


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


def train(name, make, data):
    """Trains one network and returns it."""
    keras.utils.set_random_seed(0)
    base = models.mlp(data.input_shape, data.num_classes, hidden=(100, 100))
    model, callbacks = make(base)
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    print(f"\nTraining: {name}")
    model.fit(
        *data.train,
        validation_data=data.validation,
        epochs=_EPOCHS.value,
        batch_size=64,
        callbacks=[EpochBar(), *callbacks],
        verbose=0,
    )
    return base


def defences():
    """Name -> function from a base model to (model, callbacks)."""
    ramp = keras_rub.callbacks.RhoSchedule

    def nominal(base):
        return base, []

    def arub(base):
        return keras_rub.ARUBModel(base, rho=1.0, norm=1), [
            ramp(epochs=_EPOCHS.value // 2)
        ]

    def rub(base):
        return keras_rub.RUBModel(base, rho=1.0), [
            ramp(epochs=_EPOCHS.value // 2)
        ]

    return {"nominal": nominal, "aRUB": arub, "RUB": rub}


def attack(base, x, y, rho, steps=20):
    """Looks for a misclassified point in the L1 ball (Frank-Wolfe steps)."""

    @tf.function(reduce_retracing=True)
    def toward(points, size):
        with tf.GradientTape() as tape:
            tape.watch(points)
            logits = base(points)
            own = tf.gather(logits, y[:, None], batch_dims=1)
            rivals = logits - 1e9 * tf.one_hot(y, 10)
            margin = tf.reduce_max(rivals, axis=1, keepdims=True) - own
        gradient = tape.gradient(margin, points)
        best = tf.argmax(tf.abs(gradient), axis=1)
        sign = tf.sign(tf.gather(gradient, best[:, None], batch_dims=1))
        vertex = x + rho * sign * tf.one_hot(best, x.shape[1])
        return points + size * (vertex - points)

    x, y = tf.constant(x), tf.constant(y, tf.int32)
    found, wrong = x, base(x).numpy().argmax(1) != y.numpy()
    points = x
    for step in range(steps):
        points = toward(points, tf.constant(2.0 / (step + 2.0)))
        now = (base(points).numpy().argmax(1) != y.numpy()) & ~wrong
        found = tf.where(now[:, None], points, found)
        wrong |= now
    return found.numpy(), wrong


def evaluate(name, base, x, y):
    """Attacked and certified accuracy of one network at every radius."""
    certified = keras_rub.certify(base, x, y, rho=RADII, decide_only=True)
    rows = []
    for rho, certificate in zip(RADII, certified, strict=True):
        _, wrong = attack(base, x, y, rho)
        rows.append((1.0 - wrong.mean(), certificate.certified_accuracy))
    print(f"  {name}: done")
    return np.array(rows)


def print_table(results):
    """One row a network and quantity, one column a radius."""
    print("\nL1 radius".ljust(27) + "".join(f"{rho:8g}" for rho in RADII))
    for name, rows in results.items():
        print(f"{name:9s} clean          {rows[0, 0]:8.1%}")
        for column, kind in enumerate(("attacked", "certified")):
            cells = "".join(f"{value:8.1%}" for value in rows[:, column])
            print(f"{'':9s} {kind:15s} {cells}")


def draw(path, results, bases, x, y):
    """The curves, and a few digits with their radii and attacks."""
    figure = plt.figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    axes = left.subplots()
    for (name, rows), color in zip(
        results.items(), ("tab:gray", "tab:orange", "tab:blue"), strict=True
    ):
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

    base, rho = bases["RUB"], RADII[-1]
    adversarial, wrong = attack(base, x, y, rho)
    chosen = np.flatnonzero(wrong & (base.predict(x, verbose=0).argmax(1) == y))
    chosen = chosen[:4]
    radius = keras_rub.certified_radius(base, x[chosen], y[chosen])
    right.suptitle(f"RUB network: digits that an attack of rho = {rho:g} finds")
    rows = right.subplots(2, 4, squeeze=False)
    for axes in rows.flat:
        axes.axis("off")
    for column, sample in enumerate(chosen):
        attacked = adversarial[sample]
        now = base.predict(attacked[None], verbose=0).argmax()
        for axes, image, title in (
            (rows[0, column], x[sample], f"certified to\n{radius[column]:.2f}"),
            (rows[1, column], attacked, f"{y[sample]} read as {now}"),
        ):
            axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axes.set_title(title, fontsize=9)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\nPicture: {path}")


def main(argv):
    del argv
    data = datasets.load("digits")
    x, y = (part[: _SAMPLES.value] for part in data.test)
    bases = {name: train(name, make, data) for name, make in defences().items()}
    print("\nAttacking and certifying the test digits")
    results = {name: evaluate(name, base, x, y) for name, base in bases.items()}
    print_table(results)
    draw(_OUT.value, results, bases, x, y)


if __name__ == "__main__":
    app.run(main)
