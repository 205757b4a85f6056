"""Train a robust convolutional network and look at the images that fool it.

    python examples/images.py
    python examples/images.py --dataset mnist --data_dir DATA --rho 2.8

By default the images are scikit-learn's digits, 8x8 pixels, which need no
download; mnist, fashion_mnist and cifar10 come from the data folder. The
network is trained with RUB, which knows that pixels stay in [0, 1]. The table
says what attacks leave and what is proved; the picture shows attacked images.
"""

import pathlib

import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

import keras_rub
from keras_rub import datasets
from keras_rub.evaluation import plots

_DATASET = flags.DEFINE_enum(
    "dataset",
    "digits",
    ["digits", "mnist", "fashion_mnist", "cifar10"],
    "The images.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with NAME.npz; KERAS_RUB_DATA by default."
)
_RHO = flags.DEFINE_float("rho", 1.0, "L1 radius, pixels in [0, 1].")
_STEPS = flags.DEFINE_integer("steps", 600, "Steps of training.")
_SAMPLES = flags.DEFINE_integer("samples", 200, "Test images to look at.")
_OUT = flags.DEFINE_string("out", "out/images.png", "Where to draw.")

_EPOCHS = 10


def load():
    """Training and test images [n, height, width, channels] in [0, 1]."""
    data = datasets.load(_DATASET.value, _DATA_DIR.value)

    def images(part):
        x, y = part
        return (x if data.is_image else x.reshape(-1, 8, 8, 1)), y

    return images(data.train), images(data.test)


def network(shape):
    """Strided convolutions: easier to bound than max pooling."""
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(x, y):
    """The network, trained with RUB."""
    keras.utils.set_random_seed(0)
    model = keras_rub.RUBModel(
        network(x.shape[1:]), rho=_RHO.value, input_range=(0.0, 1.0)
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    batches = batches.shuffle(len(x), seed=0).repeat().batch(64).prefetch(2)
    model.fit(
        batches,
        epochs=_EPOCHS,
        steps_per_epoch=max(_STEPS.value // _EPOCHS, 1),
        # Without the ramp a large radius keeps the network at chance.
        callbacks=[keras_rub.callbacks.RhoSchedule(epochs=_EPOCHS // 2)],
        shuffle=False,  # done above
        verbose=2,
    )
    return model


def main(argv):
    del argv
    (x, y), (x_test, y_test) = load()
    model = train(x, y)
    result = keras_rub.evaluate(
        model,
        x_test[: _SAMPLES.value],
        y_test[: _SAMPLES.value],
        norms=[1],
        radii=[_RHO.value / 2, _RHO.value, 2 * _RHO.value],
        attacks=["apgd-ce", "apgd-targeted"],
        certificates="rub",
        input_range=(0.0, 1.0),
        verbose=0,
    )
    print(result)
    path = pathlib.Path(_OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.image_grid(result, norm=1).savefig(path, dpi=110)
    print(f"\nPicture: {path}")


if __name__ == "__main__":
    app.run(main)
