"""Certify a network with a layer of your own, by giving the layer a rule.

    python examples/custom_layer.py

The layer is Maxout: each output is the largest of several affine maps. Without
a rule the library refuses to certify it. The rule says how the layer is made of
the operations that a bound knows (affine, convex, max); then training with RUB
and certificates work as for any other layer. At the end the bound is compared
with the margins at random points, as a test of a new rule should.
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_rub
from keras_rub import datasets

_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of training.")
_SAMPLES = flags.DEFINE_integer("samples", 100, "Test digits to look at.")
_RHO = flags.DEFINE_float("rho", 0.5, "L1 radius, pixels in [0, 1].")


@keras.saving.register_keras_serializable("examples")
class Maxout(keras.layers.Layer):
    """The largest of `pieces` affine maps, for each of `units` outputs."""

    def __init__(self, units, pieces=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.pieces = pieces

    def build(self, input_shape):
        shape = (self.units, self.pieces)
        self.kernel = self.add_weight(shape=(input_shape[-1], *shape))
        self.bias = self.add_weight(shape=shape, initializer="zeros")

    def call(self, x):
        pieces = keras.ops.tensordot(x, self.kernel, axes=1) + self.bias
        return keras.ops.max(pieces, axis=-1)

    def get_config(self):
        sizes = {"units": self.units, "pieces": self.pieces}
        return {**super().get_config(), **sizes}


def maxout_rule(layer, x):
    """The same in symbols: an affine map, then a maximum."""

    # Weights are cast because certificates may run in float64.
    def apply(t):
        kernel, bias = (tf.cast(w, t.dtype) for w in (layer.kernel, layer.bias))
        return tf.tensordot(t, kernel, axes=1) + bias

    def magnitude(r):
        return tf.tensordot(r, tf.abs(tf.cast(layer.kernel, r.dtype)), axes=1)

    return x.affine(apply, magnitude).max(axis=-1)


def largest_margin(model, x, y, rho, count=200):
    """The largest margin z_k - z_y [n, K] at random vertices of the ball."""
    rng = np.random.default_rng(0)
    best = np.full((len(x), 10), -np.inf)
    for _ in range(count):
        vertex = np.eye(x.shape[1])[rng.integers(x.shape[1], size=len(x))]
        sign = rng.choice([-1, 1], size=(len(x), 1))
        logits = model.predict_on_batch(x + rho * sign * vertex)
        own = np.take_along_axis(logits, y[:, None], axis=1)
        best = np.maximum(best, logits - own)
    return best


def main(argv):
    del argv
    keras.utils.set_random_seed(0)
    data = datasets.load("digits")
    x, y = (part[: _SAMPLES.value] for part in data.test)
    layers = [keras.layers.Input((64,)), Maxout(40), keras.layers.Dense(10)]
    base = keras.Sequential(layers)
    try:
        keras_rub.certify(base, x, y, rho=_RHO.value)
    except keras_rub.UnsupportedLayerError as error:
        print(f"Without a rule:\n{error}\n")

    keras_rub.register_rule(Maxout)(maxout_rule)
    model = keras_rub.RUBModel(base, rho=_RHO.value)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(*data.train, epochs=_EPOCHS.value, batch_size=64, verbose=0)
    result = keras_rub.certify(model, x, y, rho=_RHO.value, verbose=0)
    print(f"With the rule:\n{result}\n")

    found = largest_margin(base, x, y, _RHO.value)
    others = np.arange(10) != y[:, None]
    slack = (result.margins - found)[others]
    # Where no other piece becomes the largest the bound is exact, so that
    # rounding decides which of the two numbers is larger.
    print(
        f"Margins above their bound by more than rounding: "
        f"{np.sum(slack < -1e-4)} of {slack.size}\n"
        f"Bound minus the largest margin found: {slack.mean():.3f} on average"
    )


if __name__ == "__main__":
    app.run(main)
