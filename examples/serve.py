"""Train a robust classifier of digits and export it for a server.

    python examples/serve.py

Trains with RUB on scikit-learn's digits, writes the next version of
out/models/digits with its certificates, asks the exported copy about some test
digits, and prints the command that starts TensorFlow Serving.
"""

import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import keras_rub
from keras_rub import datasets, models

_OUT = flags.DEFINE_string("out", "out/models", "Folder of all models.")
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Epochs of training.")
_RHO = flags.DEFINE_float("rho", 0.5, "The L1 radius, pixels in [0, 1].")
_SAMPLES = flags.DEFINE_integer("samples", 200, "Test digits to ask about.")

COMMAND = """\
docker run --rm -p 8500:8500 -p 8501:8501 -v {folder}:/models \\
    tensorflow/serving --model_config_file=/models/models.config \\
    --enable_batching --batching_parameters_file=/models/batching.config"""


def train(data):
    """A network trained with RUB."""
    keras.utils.set_random_seed(0)
    base = models.mlp(data.input_shape, data.num_classes, hidden=(100, 100))
    model = keras_rub.RUBModel(base, rho=_RHO.value)
    model.compile("adam", "sparse_categorical_crossentropy")
    ramp = keras_rub.callbacks.RhoSchedule(epochs=max(_EPOCHS.value // 2, 1))
    model.fit(
        *data.train,
        epochs=_EPOCHS.value,
        batch_size=64,
        verbose=0,
        callbacks=[ramp],
    )
    return model


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # TensorFlow's notes on saving
    data = datasets.load("digits")
    x, y = (part[: _SAMPLES.value] for part in data.test)
    model = train(data)
    clean = float(np.mean(model.predict(x, verbose=0).argmax(axis=-1) == y))
    folder = keras_rub.export(
        model,
        pathlib.Path(_OUT.value) / "digits",
        input_range=data.input_range,
        metadata={"dataset": data.name, "clean_accuracy": clean},
        warmup=x[:1],
    )
    keras_rub.serving.write_config(_OUT.value)
    print(f"written to {folder}")

    served = tf.saved_model.load(str(folder))
    rho = tf.fill([len(x)], _RHO.value)
    found = served.signatures["certify"](x=tf.constant(x), rho=rho)
    right = found["class"].numpy() == y
    certified = found["certified"].numpy() & right
    print(f"{len(x)} test digits, L1 radius {_RHO.value:g}")
    print(f"right: {right.mean():.1%}, certified: {certified.mean():.1%}")
    print("\nStart a server and ask it:\n")
    print(COMMAND.format(folder=pathlib.Path(_OUT.value).resolve()))
    print(f"or, on this machine: keras-rub serve {_OUT.value}")
    print("python examples/serve_client.py --server localhost:8501")


if __name__ == "__main__":
    app.run(main)
