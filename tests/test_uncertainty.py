"""Perturbation sets: dual norms, vertices, room."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_rub
from keras_rub.uncertainty import canonical_norm


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(1, 1), (2.0, 2), ("inf", "inf"), (np.inf, "inf"), (np.int64(1), 1)],
)
def test_norms_are_canonical(norm, expected):
    assert canonical_norm(norm) == expected
    assert keras_rub.PerturbationSet(norm).norm == expected


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_dual_norm_is_the_largest_inner_product(norm, rng):
    gradient = rng.normal(size=(3, 7)).astype("float32")
    order = {1: np.inf, 2: 2, "inf": 1}[norm]
    found = keras_rub.PerturbationSet(norm).dual_norm(tf.constant(gradient))
    expected = np.linalg.norm(gradient, ord=order, axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_dual_norm_has_a_finite_derivative_at_zero(norm):
    gradient = tf.zeros([2, 5])
    with tf.GradientTape() as tape:
        tape.watch(gradient)
        value = keras_rub.PerturbationSet(norm).dual_norm(gradient)
    assert np.all(value == 0.0)
    assert np.all(np.isfinite(tape.gradient(value, gradient)))


def test_vertices_of_a_masked_and_weighted_ball():
    perturbations = keras_rub.PerturbationSet(
        1, mask=[True, False, True], weights=[1.0, 1.0, 4.0]
    )
    features, steps = perturbations.vertices((3,))
    np.testing.assert_array_equal(features, [0, 2, 0, 2])
    np.testing.assert_allclose(steps, [1.0, 0.25, -1.0, -0.25])


def test_only_the_l1_ball_lists_its_vertices():
    with pytest.raises(ValueError, match="Only the L1 ball"):
        keras_rub.PerturbationSet(2).vertices((3,))


def test_room():
    perturbations = keras_rub.PerturbationSet(1, input_range=(0.0, [1.0, 2.0]))
    up, down = perturbations.room(tf.constant([[0.25, 2.0]]))
    np.testing.assert_allclose(up, [[0.75, 0.0]])
    np.testing.assert_allclose(down, [[0.25, 2.0]])
    assert keras_rub.PerturbationSet(1).room(tf.zeros([1, 2])) is None


def test_config_round_trip():
    perturbations = keras_rub.PerturbationSet(
        2, mask=[1, 0], weights=[1.0, 3.0], input_range=([0.0, -1.0], 1.0)
    )
    again = keras_rub.PerturbationSet(
        **json.loads(json.dumps(perturbations.get_config()))
    )
    assert again.get_config() == perturbations.get_config()
    assert again.get_config()["mask"] == [True, False]
