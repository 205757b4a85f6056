"""Interval bounds: exact where they must be, sound everywhere."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub
from keras_rub.bounds import intervals
from keras_rub.bounds.intervals import Ball, IntervalBound, affine_range
from keras_rub.bounds.lowering import lower
from keras_rub.bounds.majorant import clean_pass
from tests.reference import randomise

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown")

# Affine beginnings of a network, each with an input shape.
BEGINNINGS = {
    "dense": ((5,), lambda: [layers.Dense(4)]),
    "scaled": ((5,), lambda: [layers.Rescaling(-2.0, 0.3), layers.Dense(4)]),
    "conv": (
        (5, 5, 2),
        lambda: [
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
        ],
    ),
    "moved": (
        (16,),
        lambda: [layers.Reshape((4, 4, 1)), layers.Conv2D(2, 2)],
    ),
    "mixed": (
        (4, 4, 1),
        lambda: [layers.AveragePooling2D(2), layers.Conv2D(2, 2)],
    ),
}


def beginning(name):
    shape, make = BEGINNINGS[name]
    model = keras.Sequential(
        [
            layers.Input(shape),
            *make(),
            layers.Flatten(),
            layers.ReLU(),
            layers.Dense(2),
        ]
    )
    return randomise(model, np.random.default_rng(3))


def first_range(model, attacker, x, rho):
    """The range of what the first activation reads, in float64."""
    program = lower(model)
    (source,) = next(
        op.inputs for op in program.operations if hasattr(op, "activation")
    )
    ball = Ball(tf.constant(x, tf.float64), rho, attacker)
    return affine_range(program, source, ball)


def matrix_of(model, x):
    """The affine beginning as a matrix [M, H] and its values [n, H]."""
    start = keras.Sequential(model.layers[:-2])
    size = int(np.prod(x.shape[1:]))
    eye = np.eye(size).reshape(-1, *x.shape[1:])
    at_zero = np.asarray(start(0 * x[:1]), "float64")
    return np.asarray(start(eye), "float64") - at_zero, np.asarray(start(x))


@pytest.mark.parametrize("norm", [1, 2, "inf"])
@pytest.mark.parametrize("name", BEGINNINGS)
def test_first_layer_is_a_dual_norm(name, norm, rng):
    model = beginning(name)
    shape = BEGINNINGS[name][0]
    size = int(np.prod(shape))
    x = rng.uniform(0.05, 0.95, (2, *shape)).astype("float32")
    rho = np.array([0.3, 0.7])
    matrix, value = matrix_of(model, x)
    mask = (np.arange(size) % 3 > 0).reshape(shape)
    weights = np.linspace(0.5, 2.0, size).reshape(shape)
    for limits in (
        {},
        {"mask": mask, "weights": weights},
        {"input_range": (0.0, 1.0), "weights": weights},
    ):
        attacker = keras_rub.PerturbationSet(norm, **limits)
        low, high = first_range(model, attacker, x, rho)
        steps = attacker.reach(shape)[:, None] * matrix
        dual = {1: np.inf, 2: 2, "inf": 1}[norm]
        reach = rho[:, None] * np.linalg.norm(steps, dual, axis=0)
        up, down = reach, reach
        if "input_range" in limits:
            # The ball in a box: both hold, and the smaller one is taken.
            flat = x.reshape(2, -1).astype("float64")
            move = rho[:, None] * attacker.reach(shape)
            room_up, room_down = 1.0 - flat, flat
            plus, minus = np.maximum(matrix, 0), np.maximum(-matrix, 0)
            most_up = np.minimum(move, room_up)
            most_down = np.minimum(move, room_down)
            up = np.minimum(reach, most_up @ plus + most_down @ minus)
            down = np.minimum(reach, most_down @ plus + most_up @ minus)
        np.testing.assert_allclose(
            np.reshape(high, value.shape), value + up, rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            np.reshape(low, value.shape), value - down, rtol=1e-5, atol=1e-5
        )


def test_a_wide_first_layer_in_chunks(monkeypatch, rng):
    """What is too wide for a matrix is substituted some rows at a time."""
    model = beginning("moved")
    x = rng.uniform(size=(2, 16))
    for norm, limits in itertools.product(
        (1, 2), ({}, {"input_range": (0.0, 1.0)})
    ):
        attacker = keras_rub.PerturbationSet(norm, **limits)
        whole = first_range(model, attacker, x, 0.4)
        with monkeypatch.context() as patch:
            patch.setattr(intervals, "WIDEST_MATRIX", 3)
            patch.setattr(intervals, "_ROWS", 4)
            parts = first_range(model, attacker, x, 0.4)
        np.testing.assert_allclose(parts.low, whole.low, rtol=1e-6)
        np.testing.assert_allclose(parts.high, whole.high, rtol=1e-6)


@pytest.mark.eager
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_a_linear_network_is_exact(norm, rng):
    """Elision and the dual norm leave nothing to be lost."""
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(5), layers.Dense(3)]
    )
    randomise(model, rng)
    x = rng.uniform(size=(4, 6)).astype("float32")
    y = np.asarray(model(x)).argmax(1)
    weights = np.linspace(0.5, 2.0, 6)
    kernel = np.asarray(model.layers[0].kernel @ model.layers[1].kernel)
    logits = np.asarray(model(x))
    dual = {1: np.inf, 2: 2, "inf": 1}[norm]
    exact = []
    for i, label in enumerate(y):
        rows = kernel - kernel[:, label : label + 1]
        reach = np.linalg.norm(rows / weights[:, None], dual, axis=0)
        exact.append(logits[i] - logits[i, label] + 0.3 * reach)
    for method in ("ibp", "crown-ibp", "crown"):
        found = keras_rub.certify(
            model,
            x,
            y,
            rho=0.3,
            norm=norm,
            weights=weights,
            method=method,
            verbose=0,
        )
        np.testing.assert_allclose(found.margins, exact, atol=1e-4)


def test_a_growing_network_is_exact(rng):
    """With no negative weight the worst case is a corner, for intervals too."""
    model = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4, activation="relu"),
            layers.Dense(4, activation="softplus"),
            layers.Dense(2),
        ]
    )
    for weight in model.weights:
        weight.assign(np.abs(rng.normal(size=weight.shape)))
    kernel = np.abs(rng.normal(size=(4, 2))) * [-1.0, 1.0]
    model.layers[-1].kernel.assign(kernel)
    x = rng.uniform(size=(3, 3)).astype("float32")
    y = np.zeros(3, int)
    corners = np.array(list(itertools.product([-1.0, 1.0], repeat=3)))
    for rho in (0.0, 0.2, 1.0):
        found = keras_rub.certify(
            model, x, y, rho=rho, norm="inf", method="ibp", verbose=0
        )
        for i in range(3):
            logits = np.asarray(model((x[i] + rho * corners).astype("float32")))
            worst = (logits[:, 1] - logits[:, 0]).max()
            assert found.margins[i, 1] == pytest.approx(worst, rel=1e-4)


@functools.cache
def one_feature():
    return keras.Sequential(
        [
            layers.Input((1,)),
            layers.Dense(3, activation="relu"),
            layers.Dense(2),
        ]
    )


@pytest.mark.eager
@pytest.mark.parametrize("norm", [1, 2, "inf"])
@pytest.mark.parametrize("method", METHODS)
def test_one_feature_and_no_radius(method, norm, rng):
    model = randomise(one_feature(), rng)
    x = rng.uniform(size=(4, 1)).astype("float32")
    logits = np.asarray(model(x))
    y = logits.argmax(1)
    clean = logits - logits[np.arange(4), y][:, None]
    settings = {"norm": norm, "method": method, "verbose": 0}
    found = keras_rub.certify(model, x, y, rho=0.0, **settings)
    np.testing.assert_allclose(found.margins, clean, atol=1e-5)
    assert found.certified.all()
    found = keras_rub.certify(model, x, y, rho=0.3, **settings)
    for i in range(4):
        points = x[i] + np.linspace(-0.3, 0.3, 2001)[:, None]
        values = np.asarray(model(points.astype("float32")))
        worst = (values - values[:, y[i]][:, None]).max(axis=0)
        assert np.all(worst <= found.margins[i] + 1e-5)


def test_ranges_hold_every_value(rng):
    """Each value of each operation, at many points of the set."""
    model = keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(3, 3, padding="same", activation="gelu"),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(5, activation="tanh"),
            layers.Dense(3),
        ]
    )
    randomise(model, rng)
    program = lower(model)
    x = rng.uniform(size=(1, 6, 6, 1)).astype("float32")
    attacker = keras_rub.PerturbationSet("inf")
    bound = IntervalBound(program, Ball(tf.constant(x), 0.2, attacker))
    points = x + rng.uniform(-0.2, 0.2, (500, 6, 6, 1)).astype("float32")
    values = clean_pass(program, tf.constant(points)).values
    held = 0
    for index, interval in bound.values.items():
        value = values[index].numpy()
        slack = 1e-5 * (1.0 + np.abs(value).max())
        assert np.all(value >= interval.low.numpy() - slack), index
        assert np.all(value <= interval.high.numpy() + slack), index
        held += 1
    assert held >= 6
