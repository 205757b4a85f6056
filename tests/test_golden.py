"""Bounds keep their numbers: stored networks, stored margins and radii.

The file golden/bounds.npz holds the weights of three small networks, inputs,
and what every method said of them. `python -m tests.test_golden` writes it
anew; do so only when a bound is meant to change, and say why.
"""

import pathlib

import keras
import numpy as np
import pytest

import keras_rub

FILE = pathlib.Path(__file__).parent / "golden" / "bounds.npz"
RADII = (0.05, 0.3)
CASES = {
    "plain": {},
    "range": {"input_range": (0.0, 1.0)},
    "mask": {"mask": "half"},
    "weights": {"weights": "growing", "input_range": (0.0, 1.0)},
}
METHODS = {1: ("rub", "alpha-rub", "crown", "coap"), 2: ("crown", "coap")}
METHODS["inf"] = METHODS[2]


def dense():
    return keras_rub.models.mlp([12], 4, (16, 16))


def conv():
    return keras.Sequential(
        [
            keras.layers.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(5, 3, activation="leaky_relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="softplus"),
            keras.layers.Dense(3),
        ]
    )


def residual():
    x = keras.Input((10,))
    h = keras.layers.Dense(10, activation="relu")(x)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.Add()([h, x])
    h = keras.layers.Dense(8, activation="elu")(h)
    return keras.Model(x, keras.layers.Dense(3)(h))


NETWORKS = {"dense": dense, "conv": conv, "residual": residual}


def attacker(case, shape):
    size = int(np.prod(shape))
    arrays = {
        "half": np.arange(size).reshape(shape) % 2 == 0,
        "growing": np.linspace(0.5, 2.0, size).reshape(shape),
    }
    return {
        name: arrays[value] if isinstance(value, str) else value
        for name, value in CASES[case].items()
    }


def answers(model, x, name, case):
    """Every number that is stored of one network and attacker, by key."""
    limits = attacker(case, x.shape[1:])
    found = {
        f"{name}/{case}/radius": keras_rub.certified_radius(
            model, x, method="rub", tolerance=1e-3, norm=1, **limits
        )
    }
    for norm, methods in METHODS.items():
        for method in methods:
            table = keras_rub.certify(
                model, x, rho=RADII, norm=norm, method=method, **limits
            )
            key = f"{name}/{case}/{norm}/{method}"
            found[key] = np.stack([c.margins for c in table])
    return found


def write():
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(7)
    stored = {}
    for name, make in NETWORKS.items():
        model = make()
        for index, weight in enumerate(model.get_weights()):
            noise = rng.normal(scale=0.1, size=weight.shape)
            stored[f"{name}/weight/{index}"] = (
                np.abs(weight + noise) if weight.ndim == 1 else weight + noise
            ).astype("float32")
        model.set_weights(weights_of(stored, name))
        x = rng.uniform(size=(6, *model.input_shape[1:])).astype("float32")
        stored[f"{name}/x"] = x
        for case in CASES:
            stored.update(answers(model, x, name, case))
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **stored)


def weights_of(stored, name):
    keys = [key for key in stored if key.startswith(f"{name}/weight/")]
    return [
        stored[key]
        for key in sorted(keys, key=lambda k: int(k[-2:].strip("/")))
    ]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if quick else pytest.mark.slow)
        for name in NETWORKS
        for case in CASES
        for quick in [name == "dense" and case in ("plain", "weights")]
    ],
)
def test_bounds_keep_their_numbers(name, case):
    stored = np.load(FILE)
    model = NETWORKS[name]()
    model.set_weights(weights_of(stored, name))
    found = answers(model, stored[f"{name}/x"], name, case)
    for key, value in found.items():
        np.testing.assert_allclose(
            value, stored[key], rtol=1e-4, atol=1e-5, err_msg=key
        )


if __name__ == "__main__":
    write()
