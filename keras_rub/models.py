"""The networks of the paper, as plain Keras models that return logits."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (200, 200, 200),
) -> keras.Model:
    """A multilayer perceptron with ReLU activations.

    Weights start from Keras's default, the Glorot initialisation that the
    paper uses.

    Args:
        input_shape: shape of one input; anything but a vector is flattened.
        num_classes: int. K.
        hidden: widths of the hidden layers. Defaults to `(200, 200, 200)`.

    Returns:
        A built `keras.Sequential` with logits [batch, K] as its output.
    """
    flatten = [] if len(input_shape) == 1 else [layers.Flatten()]
    return keras.Sequential(
        [
            layers.Input(tuple(input_shape)),
            *flatten,
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
    if len(input_shape) != 3:
        raise ValueError(
            "`input_shape` must be (height, width, channels). "
            f"Received: `input_shape={tuple(input_shape)}`"
        )
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
