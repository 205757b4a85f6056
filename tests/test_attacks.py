"""Projections and gradient ascent."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy.optimize import minimize

import keras_rub
from keras_rub.attacks import ascend, project

NORMS = pytest.mark.parametrize("norm", [1, 2, "inf"])


def size(d, norm, weights=1.0):
    """The weighted norm of each row."""
    order = {1: 1, 2: 2, "inf": np.inf}[norm]
    return np.linalg.norm((d * weights).reshape(len(d), -1), order, axis=1)


@NORMS
@pytest.mark.parametrize("limited", [False, True])
def test_projection_is_inside_nearest_and_idempotent(norm, limited, rng):
    x = rng.uniform(size=(40, 6)).astype("float32")
    d = rng.normal(scale=1.5, size=(40, 6)).astype("float32")
    rho = rng.uniform(0.0, 2.0, 40).astype("float32")
    rho[0] = 0.0
    weights = rng.uniform(0.5, 2.0, 6)
    mask = np.array([1, 1, 0, 1, 1, 1])
    perturbations = keras_rub.PerturbationSet(
        norm,
        mask=mask,
        weights=weights,
        input_range=(0.0, 1.0) if limited else None,
    )
    found = project(d, tf.constant(x), rho, perturbations).numpy()
    assert np.all(size(found, norm, weights) <= rho + 1e-5)
    assert np.all(found[:, 2] == 0.0)
    if limited:
        assert np.all((x + found >= -1e-6) & (x + found <= 1 + 1e-6))
    again = project(found, tf.constant(x), rho, perturbations).numpy()
    np.testing.assert_allclose(again, found, atol=2e-6)
    # No other point of the set is nearer.
    target = d * mask
    for _ in range(200):
        other = rng.normal(scale=1.0, size=(40, 6))
        other = project(
            other.astype("float32"), tf.constant(x), rho, perturbations
        ).numpy()
        assert np.all(
            np.linalg.norm(found - target, axis=1)
            <= np.linalg.norm(other - target, axis=1) + 1e-4
        )


@pytest.mark.parametrize("norm", [1, 2])
def test_projection_against_a_solver(norm, rng):
    weights = np.array([1.0, 2.0, 0.5])
    for _ in range(8):
        x, v = rng.uniform(size=3), rng.normal(size=3)
        rho = float(rng.uniform(0.2, 1.0))
        found = project(
            v[None].astype("float32"),
            tf.constant(x[None], tf.float32),
            rho,
            keras_rub.PerturbationSet(
                norm, weights=weights, input_range=(0.0, 1.0)
            ),
        ).numpy()[0]
        # d = a - b with a, b >= 0 makes the L1 norm smooth.
        solved = minimize(
            lambda z, v=v: np.sum((z[:3] - z[3:] - v) ** 2),
            np.zeros(6),
            bounds=[(0, 1 - t) for t in x] + [(0, t) for t in x],
            constraints={
                "type": "ineq",
                "fun": lambda z, rho=rho: (
                    rho - weights @ (z[:3] + z[3:])
                    if norm == 1
                    else rho**2 - np.sum((weights * (z[:3] - z[3:])) ** 2)
                ),
            },
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 500},
        )
        np.testing.assert_allclose(
            found, solved.x[:3] - solved.x[3:], atol=2e-3
        )


@NORMS
def test_ascent_on_a_linear_function_reaches_the_dual_norm(norm, rng):
    g = rng.normal(size=7).astype("float32")
    weights = rng.uniform(0.5, 2.0, 7)
    perturbations = keras_rub.PerturbationSet(norm, weights=weights)
    x = rng.normal(size=(3, 7)).astype("float32")
    rho = np.array([0.5, 1.0, 2.0], "float32")
    found = ascend(
        lambda points: tf.linalg.matvec(points, g),
        tf.constant(x),
        rho,
        perturbations,
        steps=60,
        step_size=0.25,
        random_start=True,
    ).numpy()
    dual = {1: np.inf, 2: 2, "inf": 1}[norm]
    best = rho * np.linalg.norm(g / weights, dual)
    assert np.all(size(found - x, norm, weights) <= rho * (1 + 1e-4))
    np.testing.assert_allclose((found - x) @ g, best, rtol=0.02)


@NORMS
@pytest.mark.parametrize(
    "wrap",
    [
        keras_rub.BaselineModel,
        keras_rub.PGDModel,
        keras_rub.FGSMModel,
        keras_rub.COAPModel,
    ],
)
def test_defence_on_a_linear_network(wrap, norm, rng, tmp_path):
    """All defences know the worst case of a linear network with 2 classes."""
    base = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
    kernel = rng.normal(size=(5, 2)).astype("float32")
    base.set_weights([kernel, np.zeros(2, "float32")])
    x = rng.normal(size=(16, 5)).astype("float32")
    y = np.arange(16) % 2
    rho = 0.4
    model = wrap(base, rho=rho, norm=norm)
    model.compile("sgd", "sparse_categorical_crossentropy")
    found = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    dual = {1: np.inf, 2: 2, "inf": 1}[norm]
    slope = np.linalg.norm(kernel[:, 1] - kernel[:, 0], dual)
    z = x @ kernel
    margin = z[np.arange(16), 1 - y] - z[np.arange(16), y]
    clean = np.log1p(np.exp(margin))
    if wrap is keras_rub.BaselineModel:
        # d loss / d margin is the probability of the other class.
        expected = clean + rho * slope / (1 + np.exp(-margin))
    else:
        expected = np.log1p(np.exp(margin + rho * slope))
    tolerance = 0.03 if wrap is keras_rub.FGSMModel and norm == 2 else 0.02
    if wrap is keras_rub.FGSMModel:
        assert found["loss"] <= expected.mean() + 1e-5
        assert found["loss"] >= clean.mean()
    else:
        np.testing.assert_allclose(
            found["loss"], expected.mean(), rtol=tolerance
        )
    np.testing.assert_allclose(found["clean_loss"], clean.mean(), rtol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again) is wrap and again.norm == norm
    assert again.get_config().keys() == model.get_config().keys()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"steps": 0}, "`steps` must be"),
        ({"restarts": 0}, "`restarts` must be"),
        ({"step_size": 0.0}, "`step_size` must be"),
        ({"norm": 3}, "`norm` must be"),
    ],
)
def test_bad_arguments(kwargs, message):
    base = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
    with pytest.raises(ValueError, match=message):
        keras_rub.PGDModel(base, **kwargs)


@pytest.mark.parametrize(
    ("wrap", "norm", "rho"),
    [
        (keras_rub.BaselineModel, "inf", 0.1),
        (keras_rub.PGDModel, "inf", 0.1),
        (keras_rub.FGSMModel, "inf", 0.1),
        (keras_rub.COAPModel, "inf", 0.03),
    ],
)
def test_each_defence_beats_nominal_training(wrap, norm, rho):
    data = keras_rub.datasets.load("digits")

    def train(make):
        keras.utils.set_random_seed(0)
        base = keras_rub.models.mlp((64,), 10, hidden=(48,))
        model = make(base)
        model.compile(
            keras.optimizers.Adam(5e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(*data.train, epochs=12, batch_size=64, verbose=0)
        return base

    def accuracies(base):
        x, y = data.test
        labels = tf.constant(y, tf.int32)

        def loss(points):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, base(points)
            )

        attacked = ascend(
            loss,
            tf.constant(x),
            0.1,
            keras_rub.PerturbationSet(norm, input_range=(0.0, 1.0)),
            steps=20,
            step_size=0.2,
            random_start=True,
        )
        return [
            np.mean(np.argmax(base(points), axis=1) == y)
            for points in (x, attacked)
        ]

    nominal = accuracies(train(lambda base: base))
    extra = {} if wrap is keras_rub.BaselineModel else {
        "input_range": (0.0, 1.0)
    }  # fmt: skip
    robust = accuracies(train(lambda base: wrap(base, rho, norm, **extra)))
    assert robust[0] > 0.88
    assert robust[1] > nominal[1] + 0.05
