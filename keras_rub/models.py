"""Networks: those of papers, untrained, and those of the zoo, trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from keras_rub import zoo
from keras_rub.loading import load_model


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (200, 200, 200),
    preprocessing: keras.layers.Layer | None = None,
) -> keras.Model:
    """A multilayer perceptron with ReLU activations.

    Weights start from Keras's default, the Glorot initialisation that the
    paper uses.

    Args:
        input_shape: shape of one input; anything but a vector is flattened.
        num_classes: int. K.
        hidden: widths of the hidden layers. Defaults to `(200, 200, 200)`.
        preprocessing: layer that comes first, such as
            `keras_rub.datasets.Dataset.preprocessing()`, or `None`. Radii are
            in the units before it. Defaults to `None`.

    Returns:
        A built `keras.Sequential` with logits [batch, K] as its output.
    """
    first = [] if preprocessing is None else [preprocessing]
    if len(input_shape) != 1:
        first.append(layers.Flatten())
    return keras.Sequential(
        [
            layers.Input(tuple(input_shape)),
            *first,
            *(layers.Dense(width, activation="relu") for width in hidden),
            layers.Dense(num_classes),
        ],
        name="mlp",
    )


def cnn(input_shape: Sequence[int], num_classes: int) -> keras.Model:
    """The convolutional network of the paper's appendix.

    Two 5x5 convolutions with 32 and 64 filters, each followed by 2x2 max
    pooling, then dense layers of 1024 and K.

    Args:
        input_shape: shape of one image, [height, width, channels].
        num_classes: int. K.

    Returns:
        A built `keras.Sequential` with logits [batch, K] as its output.
    """
    _check_image(input_shape)
    return keras.Sequential(
        [
            layers.Input(tuple(input_shape)),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(num_classes),
        ],
        name="cnn",
    )


def small_cnn(
    input_shape: Sequence[int],
    num_classes: int,
    kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
    filters: Sequence[int] = (16, 32),
    units: int = 100,
) -> keras.Model:
    """The small network of the papers on provable Linf robustness.

    4x4 convolutions with stride 2, then dense layers of `units` and K; no
    pooling (Wong and Kolter).

    Args:
        input_shape: shape of one image, [height, width, channels].
        num_classes: int. K.
        kernel_initializer: of all layers, such as
            `keras_rub.IBPInitializer()`. Defaults to `"glorot_uniform"`.
        filters: of the convolutions. Defaults to `(16, 32)`.
        units: int. Width of the dense layer. Defaults to 100.

    Returns:
        A built `keras.Sequential` with logits [batch, K] as its output.
    """
    _check_image(input_shape)
    start = {"kernel_initializer": kernel_initializer}
    shape = {"strides": 2, "padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            layers.Input(tuple(input_shape)),
            *(layers.Conv2D(count, 4, **shape, **start) for count in filters),
            layers.Flatten(),
            layers.Dense(units, activation="relu", **start),
            layers.Dense(num_classes, **start),
        ],
        name="small_cnn",
    )


def names(folder: str | os.PathLike | None = None) -> list[str]:
    """The names that `load` knows, and those kept by their recipe only.

    Args:
        folder: as in `load`.
    """
    return sorted(zoo.read_index(zoo.find_folder(folder)))


def facts(name: str, folder: str | os.PathLike | None = None) -> dict[str, Any]:
    """What the zoo says of one of its networks.

    Args:
        name: one of `names()`.
        folder: as in `load`.

    Returns:
        A dict: file and checksum, data set and units, attacker, recipe, and
        how many test samples are right, certified, and right under attack.
    """
    return zoo.find_entry(zoo.find_folder(folder), name)


def load(name: str, folder: str | os.PathLike | None = None) -> keras.Model:
    """A trained network of the zoo.

    Args:
        name: one of `names()`. Its file is checked against the checksum of
            the index.
        folder: the folder of the zoo. Defaults to `None`: the environment
            variable `KERAS_RUB_ZOO`, else the folder `zoo` of a clone; an
            installed package has none.

    Returns:
        The robust model, not compiled, whose attacker is the one that the
        figures of the zoo speak of; `base` is the plain Keras model in it. A
        network that was trained without a defence is a plain model.

    Example:
    ```python
    model = keras_rub.models.load("digits-l1-1")
    x, y = keras_rub.datasets.load("digits").test
    print(keras_rub.certify(model, x, y, rho=1.0))
    ```
    """
    return load_model(zoo.find_file(zoo.find_folder(folder), name))


def _check_image(input_shape: Sequence[int]) -> None:
    if len(input_shape) != 3:
        raise ValueError(
            "`input_shape` must be (height, width, channels). "
            f"Received: `input_shape={tuple(input_shape)}`"
        )
