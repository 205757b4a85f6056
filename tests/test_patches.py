"""The evaluation by patches against that of whole images."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_rub import PerturbationSet
from keras_rub.bounds.problem import Problem
from keras_rub.tracing import compiled

NETWORKS = {
    "strides": (
        (14, 14, 1),
        [
            layers.Conv2D(3, 4, 2, padding="same", activation="relu"),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(7, activation="relu"),
        ],
    ),
    "tiles that leave a rest": (
        (13, 17, 2),
        [
            layers.Conv2D(3, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 2, activation="softplus"),
            layers.BatchNormalization(),
            layers.MaxPooling2D((3, 2)),
            layers.Flatten(),
            layers.Dense(7, activation="relu"),
        ],
    ),
    "dilated, scaled, averaged": (
        (30, 2),
        [
            layers.Rescaling(3.0, 1.0),
            layers.Conv1D(3, 3, dilation_rate=2),
            layers.BatchNormalization(),
            layers.Activation("elu"),
            layers.AveragePooling1D(2),
            layers.Flatten(),
            layers.Dense(7, activation="relu"),
        ],
    ),
    "margins read the patch": (
        (15, 15, 1),
        [
            layers.Conv2D(3, 3, 2, activation="relu"),
            layers.Conv2D(3, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
        ],
    ),
}


def _network(name, rng):
    shape, hidden = NETWORKS[name]
    copies = [type(layer).from_config(layer.get_config()) for layer in hidden]
    network = keras.Sequential([layers.Input(shape), *copies, layers.Dense(3)])
    for layer in network.layers:
        for weight in layer.weights:
            moved = 0.3 * rng.normal(size=weight.shape)
            positive = "variance" in weight.path
            weight.assign(weight + (np.abs(moved) if positive else moved))
    return network


def _attacker(kind, shape, rng):
    if kind == "plain":
        return PerturbationSet(1)
    return PerturbationSet(
        1,
        mask=rng.random(shape) < 0.7,
        weights=rng.random(shape) + 0.5,
        input_range=(0.0, 1.0),
    )


def _both(problem, *args):
    """The margins at all vertices, by patches and by whole images."""

    def margins():
        bound = problem.vertex_bound(*args)
        assert bound.plan is not None
        return bound.at_all(), bound.over_chunks(bound.at)

    return compiled(margins)()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["plain", "masked, weighted, ranged"])
def test_patches_agree_with_whole_images(name, kind, rng):
    network = _network(name, rng)
    shape = network.input_shape[1:]
    x = tf.constant(rng.random((5, *shape)), tf.float32)
    labels = tf.constant(rng.integers(0, 3, 5), tf.int32)
    rho = tf.constant([0.5, 0.1, 3.0, 2.0, 0.0])
    # A few samples at a time: chunks must come out in order.
    problem = Problem.of(network, _attacker(kind, shape, rng), 150_000)
    patches, whole = _both(problem, x, labels, rho)
    np.testing.assert_allclose(patches, whole, atol=2e-5, rtol=2e-5)
    assert float(tf.reduce_max(tf.math.reduce_std(whole, axis=1))) > 1e-3


def test_other_lines_below_the_activations(rng):
    # Their majorant is not exact at the clean input, also outside the patch.
    network = _network("strides", rng)
    x = tf.constant(rng.random((4, 14, 14, 1)), tf.float32)
    labels = tf.constant([0, 1, 2, 0], tf.int32)
    problem = Problem.of(network, PerturbationSet(1))
    clean = problem.clean(x)
    choices = {
        index: tf.constant(rng.random(choice.shape), tf.float32)
        for index, choice in clean.choices.items()
    }
    patches, whole = _both(problem, x, labels, tf.constant(1.0), choices)
    np.testing.assert_allclose(patches, whole, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "hidden",
    [
        # The patch is as large as the image.
        [layers.Conv2D(2, 9, padding="same", activation="relu")],
        # Windows that overlap.
        [
            layers.Conv2D(2, 2, activation="relu"),
            layers.MaxPooling2D(3, strides=1),
        ],
        # No convolution at all.
        [layers.Dense(3, activation="relu")],
    ],
)
def test_networks_without_patches(hidden):
    network = keras.Sequential(
        [layers.Input((8, 8, 1)), *hidden, layers.Flatten(), layers.Dense(2)]
    )
    problem = Problem.of(network, PerturbationSet(1))
    x = tf.zeros([1, 8, 8, 1])
    bound = problem.vertex_bound(x, tf.zeros([1], tf.int32), tf.constant(1.0))
    assert bound.plan is None


def test_skip_connections_end_the_patches(rng):
    inputs = keras.Input((12, 12, 1))
    first = layers.Conv2D(2, 3, padding="same", activation="relu")(inputs)
    second = layers.Conv2D(2, 3, padding="same", activation="relu")(first)
    joined = layers.Flatten()(layers.Add()([first, second]))
    network = keras.Model(inputs, layers.Dense(3)(joined))
    problem = Problem.of(network, PerturbationSet(1))
    x = tf.constant(rng.random((2, 12, 12, 1)), tf.float32)
    bound = problem.vertex_bound(x, tf.constant([0, 1]), tf.constant(1.0))
    assert bound.plan is None


@pytest.mark.parametrize("constant", [False, True])
def test_one_pixel_that_may_change_and_two_classes(constant, rng):
    network = keras.Sequential(
        [
            layers.Input((9, 9, 1)),
            layers.Conv2D(2, 2, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    if constant:
        for weight in network.weights:
            weight.assign(tf.zeros_like(weight))
    mask = np.zeros((9, 9, 1), bool)
    mask[8, 3] = True  # in a row that no window reads
    mask[7, 0] = True
    problem = Problem.of(network, PerturbationSet(1, mask=mask))
    x = tf.constant(rng.random((2, 9, 9, 1)), tf.float32)
    patches, whole = _both(problem, x, tf.constant([0, 1]), tf.constant(2.0))
    assert patches.shape == (2, 4, 1)
    np.testing.assert_allclose(patches, whole, atol=1e-5)
