"""The mistakes of the first hour, and what the library says to each.

Every message names what was wrong and what to do, and comes before TensorFlow
has a chance to fail on its own.
"""

import re

import keras
import numpy as np
import pytest
from keras import layers

import keras_rub
from keras_rub import attacks, datasets
from keras_rub.serving.development import DevelopmentServer
from keras_rub.training import Recipe

X = np.linspace(0.0, 1.0, 40, dtype="float32").reshape(10, 4)
Y = np.arange(10) % 3


def net(*more, outputs=3, shape=(4,)):
    return keras.Sequential(
        [layers.Input(shape), layers.Dense(5, "relu"), *more,
         layers.Dense(outputs)]
    )  # fmt: skip


def fit(x=X, y=Y, loss="sparse_categorical_crossentropy", **kwargs):
    model = keras_rub.RUBModel(net(), **kwargs)
    model.compile("sgd", loss)
    model.fit(x, y, verbose=0)


def certify(x=X, y=Y, rho=0.1, base=None, **kwargs):
    return keras_rub.certify(base or net(), x, y, rho=rho, **kwargs)


def softmax_net():
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(3, activation="softmax")]
    )


MISTAKES = {
    # Wrapping the wrong thing
    "a loss of logits behind a softmax": (
        lambda: keras_rub.RUBModel(softmax_net()).compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        "ends with softmax.*from_logits=False",
    ),
    "a class instead of a model": (
        lambda: keras_rub.RUBModel(keras.Sequential),
        "must be a keras.Model",
    ),
    "one output for many classes": (
        lambda: keras_rub.RUBModel(net(outputs=1)).compile(
            "sgd", "sparse_categorical_crossentropy"
        ),
        "single output.*binary cross entropy",
    ),
    "RUB for Linf": (
        lambda: keras_rub.RUBModel(net(), norm="inf"),
        "L1 perturbations only.*IBPModel with `norm='inf'`",
    ),
    "wrapping twice": (
        lambda: keras_rub.ARUBModel(keras_rub.RUBModel(net())),
        "robust model already.*`.base`",
    ),
    "a layer without a rule": (
        lambda: keras_rub.RUBModel(net(layers.Dense(4, activation="softmax"))),
        "softmax.*ARUBModel",
    ),
    # Radii and sets
    "a negative radius": (lambda: keras_rub.RUBModel(net(), rho=-1), "`rho`"),
    "a radius in words": (
        lambda: keras_rub.RUBModel(net(), rho="small"),
        "`rho` must be a number.*'small'",
    ),
    "norm 3": (
        lambda: keras_rub.ARUBModel(net(), norm=3),
        '`norm` must be 1, 2 or "inf"',
    ),
    "a range the wrong way round": (
        lambda: keras_rub.RUBModel(net(), input_range=(1, 0)),
        "low < high",
    ),
    "a mask of another length": (
        lambda: keras_rub.RUBModel(net(), mask=[True, False]),
        "`mask` must broadcast.*\\(4,\\)",
    ),
    "weights of 0": (
        lambda: keras_rub.RUBModel(net(), weights=[1, 0, 1, 1]),
        "`weights` must be finite and above 0.*use `mask`",
    ),
    # Training
    "metrics in the place of loss weights": (
        lambda: keras_rub.RUBModel(net()).compile(
            "sgd", "sparse_categorical_crossentropy", ["accuracy"]
        ),
        "`loss_weights`.*'accuracy'.*`metrics=`",
    ),
    "no compile": (
        lambda: keras_rub.RUBModel(net()).fit(X, Y, verbose=0),
        "compile",
    ),
    "mean squared error": (
        lambda: fit(loss="mse"),
        "can't be bounded.*SparseCategoricalCrossentropy",
    ),
    "no labels": (lambda: fit(y=None), "needs the labels `y`"),
    "names as labels": (
        lambda: fit(y=np.array(["cat", "dog"] * 5)),
        "class numbers, not words.*return_inverse",
    ),
    "half a label": (lambda: fit(y=Y + 0.5), "class numbers from 0 to 2"),
    "labels that are too large": (
        lambda: fit(y=Y + 5),
        "class numbers from 0 to 2",
    ),
    "NaN in the data": (lambda: fit(x=X * np.nan), "NaN or infinite values"),
    "pixels of 0 to 255 with a range of 0 to 1": (
        lambda: fit(x=X * 255, input_range=(0, 1)),
        "leaves `input_range`",
    ),
    # Certifying
    "x and y of different lengths": (
        lambda: certify(y=Y[:3]),
        "same length.*10 and 3",
    ),
    "one sample without the batch axis": (
        lambda: certify(x=X[0], y=None),
        "`x` must have the shape \\[n, 4\\]",
    ),
    "names as labels of a certificate": (
        lambda: certify(y=["cat", "dog"] * 5),
        "class numbers, not words",
    ),
    "rub in another norm": (
        lambda: certify(norm=2, method="rub"),
        "crown.*can't do norm 2",
    ),
    "an unknown method": (
        lambda: certify(method="lp"),
        "`method` must be one of.*'lp'",
    ),
    "an unbuilt model": (
        lambda: certify(base=keras.Sequential([layers.Dense(3)])),
        "not built yet: train it, or call it once",
    ),
    "a file name instead of a model": (
        lambda: certify(base="model.keras"),
        "must be a robust model or a keras.Model",
    ),
    # Attacking
    "an unknown attack": (
        lambda: attacks.make("autoattack", net()),
        "Unknown attack 'autoattack'.*Known: .*apgd-ce",
    ),
    "no radii": (
        lambda: keras_rub.evaluate(net(), X, Y, radii=[]),
        "`radii` must hold at least one",
    ),
    "attacking outside the range": (
        lambda: attacks.PGD(net(), input_range=(0, 0.5))(X, Y, 0.1),
        "leaves `input_range`",
    ),
    # Data and tools
    "a data set with a typo": (
        lambda: datasets.load("minst"),
        "Unknown data set 'minst'.*Near names: .*'mnist'",
    ),
    "a file that is not there": (
        lambda: datasets.load("mine.csv"),
        "mine.csv does not exist",
    ),
    "a data folder that is not there": (
        lambda: datasets.load("yeast", data_dir="/no/such/folder"),
        "folder /no/such/folder does not exist",
    ),
    "rub training in Linf": (
        lambda: Recipe(defense="rub", norm="inf"),
        "for norm 1 only",
    ),
    "exporting to a version that exists": (
        lambda: keras_rub.export(net(), "/tmp", version=0),
        "`version`.*Received",
    ),
    # Serving
    "exporting an unknown signature": (
        lambda: keras_rub.export(net(), "/tmp/m", signatures=["predict"]),
        "`signatures` must be some of.*'predict'",
    ),
    "exporting to a bucket": (
        lambda: keras_rub.export(net(), "gs://models/m"),
        "`path` must be a local folder.*gs://models/m",
    ),
    "exporting for batches of none": (
        lambda: keras_rub.export(net(), "/tmp/m", max_batch_size=0),
        "`max_batch_size` must be a whole number.*`max_batch_size=0`",
    ),
    "exporting a search without an end": (
        lambda: keras_rub.export(net(), "/tmp/m", tolerance=0.0),
        "`tolerance`.*Received",
    ),
    "metadata of a folder that was not exported": (
        lambda: keras_rub.serving.read_metadata("/tmp"),
        "was not written by keras_rub.export",
    ),
    "a server without models": (
        lambda: DevelopmentServer("/no/such/folder"),
        "`models` must be a folder.*/no/such/folder",
    ),
    "a configuration of an empty folder": (
        lambda: keras_rub.serving.write_config("/no/such/folder"),
        "numbered versions.*/no/such/folder",
    ),
    # More of everything
    "a radius for each of other samples": (
        lambda: certify(rho=np.full(3, 0.1)),
        "one radius a sample.*3 radii for at least 10 samples",
    ),
    "a largest radius below 0": (
        lambda: keras_rub.certified_radius(net(), X, max_radius=-1.0),
        "`max_radius`.*-1",
    ),
    "an unknown normalization": (
        lambda: datasets.load("iris", normalization="minmax"),
        "`normalization` must be one of.*'minmax'",
    ),
    "an unknown defence": (
        lambda: Recipe(defense="rubber"),
        "`defense` must be one of.*'rubber'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name)
def test_message(mistake, monkeypatch):
    monkeypatch.delenv("KERAS_RUB_DATA", raising=False)
    act, expected = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError)) as caught:
        act()
    message = str(caught.value)
    assert re.search(expected, message, re.DOTALL), message
    for internal in ("Graph execution", "{{node", "InvalidArgumentError"):
        assert internal not in message


def test_forty_of_them():
    assert len(MISTAKES) >= 40
