"""Perturbation sets: support, vertices, room, membership, whose they are."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_rub
from keras_rub.perturbations import attacker_of, canonical_norm


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(1, 1), (2.0, 2), ("inf", "inf"), (np.inf, "inf"), (np.int64(1), 1)],
)
def test_norms_are_canonical(norm, expected):
    assert canonical_norm(norm) == expected
    assert keras_rub.PerturbationSet(norm).norm == expected


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_support_is_the_largest_inner_product(norm, rng):
    gradient = rng.normal(size=(3, 7)).astype("float32")
    order = {1: np.inf, 2: 2, "inf": 1}[norm]
    found = keras_rub.PerturbationSet(norm).support(tf.constant(gradient))
    expected = np.linalg.norm(gradient, ord=order, axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_support_has_a_finite_derivative_at_zero(norm):
    gradient = tf.zeros([2, 5])
    with tf.GradientTape() as tape:
        tape.watch(gradient)
        value = keras_rub.PerturbationSet(norm).support(gradient)
    assert np.all(value == 0.0)
    assert np.all(np.isfinite(tape.gradient(value, gradient)))


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_support_with_mask_and_weights_is_what_points_reach(norm, rng):
    shape = (2, 3)
    mask = np.array([[True, False, True]])
    weights = rng.uniform(0.5, 3.0, shape)
    attacker = keras_rub.PerturbationSet(norm, mask=mask, weights=weights)
    gradient = rng.normal(size=6).astype("float32")
    found = float(attacker.support(tf.constant(gradient), shape))
    # Random points of the set never exceed it, and the best comes near.
    d = rng.normal(size=(20000, *shape)) * mask
    d[: 2 * 6].reshape(12, 6)[:] = np.concatenate([np.eye(6), -np.eye(6)])
    d *= mask
    size = np.linalg.norm(
        (d * weights).reshape(len(d), -1),
        {1: 1, 2: 2, "inf": np.inf}[norm],
        axis=1,
    )
    d = d[size > 0] / size[size > 0][:, None, None]
    values = d.reshape(len(d), -1) @ gradient
    assert values.max() <= found * (1 + 1e-6)
    assert values.max() >= 0.9 * found


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


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_contains_knows_every_limit(norm):
    attacker = keras_rub.PerturbationSet(
        norm,
        mask=[True, True, False],
        weights=[1.0, 2.0, 1.0],
        input_range=(0.0, 1.0),
    )
    x = np.full((1, 3), 0.5)

    def holds(d, rho=0.4):
        return bool(attacker.contains(x, x + np.array([d]), rho)[0])

    assert holds([0.0, 0.0, 0.0], rho=0.0)
    assert holds([0.4, 0.0, 0.0]) and holds([0.0, -0.2, 0.0])
    assert not holds([0.0, 0.21, 0.0])  # the weight
    assert not holds([0.0, 0.0, 0.01])  # the mask
    assert not holds([0.51, 0.0, 0.0], rho=2.0)  # the range
    assert not holds([np.nan, 0.0, 0.0], rho=2.0)
    assert holds([0.3, 0.15, 0.0]) == (norm == "inf")  # the norm
    each = attacker.contains(
        np.repeat(x, 2, axis=0), np.array([[0.9, 0.5, 0.5]] * 2), [0.3, 0.5]
    )
    np.testing.assert_array_equal(each, [False, True])
    with pytest.raises(ValueError, match="shape of `x`"):
        attacker.contains(x, x[:, :2], 0.1)


def test_key_and_equality_follow_the_content():
    def make(**changes):
        arguments = {"mask": [1, 0], "weights": [1.0, 3.0], **changes}
        return keras_rub.PerturbationSet(1, **arguments)

    assert make() == make() and hash(make()) == hash(make())
    # Also in another process, for caches on disk.
    assert make().key == "9388a01c624a8795"
    others = [make(weights=[1.0, 3.5]), make(mask=None), make().with_norm(2)]
    assert len({make().key, *(other.key for other in others)}) == 4
    assert make() != "L1"
    assert str(make(input_range=(0, 1))) == (
        "L1, 1 of 2 free, weighted, inputs in [0, 1]"
    )


def test_paper_radius():
    shape = (28, 28, 1)
    assert keras_rub.PerturbationSet(1).paper_radius(0.01, shape) == (
        pytest.approx(0.28)
    )
    assert keras_rub.paper_radius(0.01, "inf", shape) == 0.01


def test_attacker_of_a_call():
    own = keras_rub.PerturbationSet("inf", mask=[True, False])

    class Model:
        perturbations = own

    assert attacker_of(Model()) is own
    assert attacker_of(Model(), norm=1) == own.with_norm(1)
    assert attacker_of(object()).norm == 1
    assert attacker_of(object(), default_norm=2).norm == 2
    given = keras_rub.PerturbationSet(2)
    assert attacker_of(Model(), given) is given
    with pytest.raises(ValueError, match="leave out `norm`.*Received"):
        attacker_of(Model(), given, norm=1)
    with pytest.raises(TypeError, match="Received: int"):
        attacker_of(Model(), 3)
