"""The aRUB bound: margins plus the dual norm of their gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.testing import assert_allclose

from keras_rub import ARUBModel
from tests.reference import randomise

NORMS = [1, 2, "inf"]
DUAL = {1: np.inf, 2: 2, "inf": 1}


def sequential(shape, *model_layers):
    return keras.Sequential([keras.Input(shape), *model_layers])


def data(shape, rng, count=4):
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, np.arange(count) % 3


def margins_of(logits, y):
    return logits - np.take_along_axis(logits, y[:, None], axis=1)


def by_hand(margins, jacobian, rho, norm, mask=True, weights=1.0):
    """`m + rho * ||mask * J / weights||` of arrays [n, K] and [n, K, M]."""
    size = np.linalg.norm(jacobian * mask / weights, DUAL[norm], axis=-1)
    return margins + rho * size


# The formula ------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_linear_network_is_exact(norm, rng):
    base = randomise(sequential((5,), layers.Dense(3)), rng)
    x, y = data((5,), rng)
    kernel, bias = base.layers[0].get_weights()
    margins = margins_of(x @ kernel + bias, y)
    jacobian = kernel.T[None] - kernel.T[y][:, None]
    rho = np.array([[0.0], [0.3], [2.0], [50.0]])
    model = ARUBModel(base, norm=norm)
    found = model.worst_case_margins(x, y, rho=rho[:, 0])
    expected = by_hand(margins, jacobian, rho, norm)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # It is attained: at a corner, a point of the sphere, or a sign vector.
    slope = jacobian[:, 1]
    size = np.linalg.norm(slope, np.inf if norm == 1 else 2, axis=1)[:, None]
    step = {
        1: np.sign(slope) * (abs(slope) == size),
        2: slope / np.maximum(size, 1e-9),
        "inf": np.sign(slope),
    }[norm]
    worst = margins_of((x + rho * step) @ kernel + bias, y)[:, 1]
    assert_allclose(found[:, 1], worst, rtol=1e-4, atol=1e-5)


def difference_jacobian(base, x, y, step=1e-2):
    """Jacobian [n, K, M] of the margins by central differences."""
    count, size = len(x), x[0].size
    moves = step * np.eye(size).reshape(size, 1, *x.shape[1:])
    ends = [
        margins_of(
            base((x + sign * moves).reshape(-1, *x.shape[1:])).numpy(),
            np.tile(y, size),
        )
        for sign in (1, -1)
    ]
    slopes = (ends[0] - ends[1]) / (2 * step)
    return slopes.reshape(size, count, -1).transpose(1, 2, 0)


@pytest.mark.parametrize("norm", NORMS)
def test_smooth_network_mask_and_weights(norm, rng):
    shape = (3, 2)
    base = sequential(
        shape, layers.Flatten(), layers.Dense(6, "tanh"), layers.Dense(3)
    )
    randomise(base, rng)
    x, y = data(shape, rng)
    margins = margins_of(base(x).numpy(), y)
    jacobian = difference_jacobian(base, x, y)
    mask = np.array([[True, False], [True, True], [False, True]])
    weights = np.array([[1.0], [0.5], [3.0]])  # one a row
    flat = {"mask": mask.reshape(-1), "weights": np.repeat(weights, 2)}
    for kwargs in ({}, {"mask": mask, "weights": weights}):
        model = ARUBModel(base, norm=norm, **kwargs)
        found = model.worst_case_margins(x, y, rho=0.7)
        expected = by_hand(
            margins, jacobian, 0.7, norm, **{k: flat[k] for k in kwargs}
        )
        assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_one_radius_a_sample(rng):
    base = randomise(
        sequential((4,), layers.Dense(5, "tanh"), layers.Dense(3)), rng
    )
    x, y = data((4,), rng)
    model = ARUBModel(base, norm=2)
    radii = np.array([0.0, 0.1, 1.0, 10.0])
    found = model.worst_case_margins(x, y, rho=radii)
    alone = model.worst_case_margins(x[3:], y[3:], rho=10.0)
    assert_allclose(found[3:], alone, rtol=1e-5)
    clean = margins_of(base(x).numpy(), y)
    assert_allclose(found[0], clean[0], atol=1e-6)
    # The bound is linear in the radius.
    unit = model.worst_case_margins(x, y, rho=1.0) - clean
    assert_allclose(found - clean, radii[:, None] * unit, rtol=1e-4, atol=1e-5)


# Any network ------------------------------------------------------------------


def margins_loss_and_gradients(model, x, y, rho):
    weights = model.base.trainable_weights
    with tf.GradientTape() as tape:
        margins = model.worst_case_margins(x, y, rho=rho)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, margins)
        )
    gradients = tape.gradient(
        loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    gradients = [np.asarray(gradient) for gradient in gradients]
    return margins, loss.numpy(), gradients


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_loss_and_gradients_are_finite_everywhere(norm, dead, rng):
    base = sequential((5,), layers.Dense(6, "relu"), layers.Dense(3))
    randomise(base, rng)
    x, y = data((5,), rng)
    if dead:  # the biases stay, so that some units are on
        for layer in base.layers:
            layer.kernel.assign(tf.zeros_like(layer.kernel))
    model = ARUBModel(base, norm=norm)
    margins, loss, gradients = margins_loss_and_gradients(model, x, y, 1e4)
    assert np.isfinite(loss) and (dead or loss > 100)
    if dead:
        assert_allclose(margins, margins_of(base(x).numpy(), y), atol=1e-6)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


class Subclassed(keras.Model):
    """A model that Keras can only run, not read."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, "swish")
        self.outputs_layer = layers.Dense(3)

    def call(self, x):
        return self.outputs_layer(self.hidden(keras.ops.sin(x)))


def residual():
    inputs = keras.Input((4,))
    h = layers.Dense(5, "relu")(inputs)
    h = layers.LayerNormalization()(h + layers.Dense(5, "sigmoid")(h))
    return keras.Model(inputs, layers.Dense(3)(h))


def images(*model_layers):
    return sequential(
        (6, 5, 2), *model_layers, layers.Flatten(), layers.Dense(3)
    )


BASES = {
    "gelu": lambda: sequential((4,), layers.Dense(5, "gelu"), layers.Dense(3)),
    "residual": residual,
    "subclassed": Subclassed,
    "batch norm": lambda: images(
        layers.Conv2D(3, 3), layers.BatchNormalization(), layers.ReLU()
    ),
    "max pool": lambda: images(
        layers.Conv2D(3, 2, activation="tanh"), layers.MaxPooling2D(2)
    ),
    "depthwise": lambda: images(
        layers.DepthwiseConv2D(2, activation="gelu"),
        layers.GlobalMaxPooling2D(),
    ),
    "two classes": lambda: sequential(
        (4,), layers.Dense(5, "tanh"), layers.Dense(2)
    ),
}


@pytest.mark.parametrize("name", BASES)
def test_any_differentiable_network_works(name, rng):
    base = BASES[name]()
    shape = base.input_shape[1:] if base.built else (4,)
    x, y = data(shape, rng)
    base(x)
    randomise(base, rng)
    y %= base(x).shape[-1]
    model = ARUBModel(base, norm="inf")
    expected = by_hand(
        margins_of(base(x).numpy(), y),
        difference_jacobian(base, x, y, step=1e-3),
        0.2,
        "inf",
    )
    found, loss, gradients = margins_loss_and_gradients(model, x, y, 0.2)
    assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    # Every kernel acts on the loss.
    weights = base.trainable_weights
    for weight, gradient in zip(weights, gradients, strict=True):
        assert "kernel" not in weight.name or np.any(gradient != 0)


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_falls_back_where_the_jacobian_cannot_be_vectorised(
    error, rng, monkeypatch
):
    # However few the classes are.
    monkeypatch.setattr("keras_rub.bounds.first_order._FEW_GRADIENTS", 0)
    base = images(layers.Conv2D(3, 2, activation="tanh"))
    randomise(base, rng)
    x, y = data((6, 5, 2), rng)
    model = ARUBModel(base, norm=2)
    margins, _, gradients = margins_loss_and_gradients(model, x, y, 0.5)
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise error("No pfor vectorization defined for SomeOp")

    monkeypatch.setattr(tf.GradientTape, "batch_jacobian", refuse)
    others = margins_loss_and_gradients(model, x, y, 0.5)
    assert calls
    assert_allclose(others[0], margins, rtol=1e-5)
    for one, other in zip(gradients, others[2], strict=True):
        assert_allclose(one, other, rtol=1e-3, atol=1e-5)
