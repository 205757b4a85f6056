"""The RUB bound against the published formula, and what must hold of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.testing import assert_allclose
from scipy.optimize import linprog

from keras_rub import PerturbationSet, RUBModel
from keras_rub.bounds import first_layer, screening, vertices
from keras_rub.bounds.problem import Problem
from tests.reference import (
    from_halfway,
    l1_vertices,
    plain_margins,
    randomise,
    vertex_margins,
)

RADII = [0.0, 0.01, 0.5, 3.0, 30.0]

NETS = {
    "linear": ((3,), lambda: [layers.Dense(3)]),
    "one feature, one unit": (
        (1,),
        lambda: [layers.Dense(1, "relu"), layers.Dense(2)],
    ),
    "deep": (
        (4,),
        lambda: [
            layers.Dense(6, "relu"),
            layers.Dense(1, "relu"),
            layers.Dense(5, "relu"),
            layers.Dense(3),
        ],
    ),
    "conv": (
        (7, 5, 1),
        lambda: [
            layers.Conv2D(3, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(2, (2, 3), activation="relu"),
            layers.Flatten(),
            layers.Dense(2),
        ],
    ),
    "pool": (
        (7, 5, 2),
        lambda: [
            layers.Conv2D(3, 2, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(2, 2, padding="same", activation="relu"),
            layers.MaxPooling2D((3, 2), strides=1, padding="same"),
            layers.Flatten(),
            layers.Dense(4, "relu"),
            layers.Dense(3),
        ],
    ),
}


def sequential(shape, model_layers, rng):
    return randomise(keras.Sequential([keras.Input(shape), *model_layers]), rng)


def network(name, rng):
    shape, make = NETS[name]
    return sequential(shape, make(), rng)


def data(model, rng, count=3):
    """Inputs strictly inside [0, 1], and labels."""
    x = rng.uniform(0.01, 0.99, (count, *model.input_shape[1:]))
    y = np.arange(count) % model.output_shape[-1]
    return x.astype("float32"), y


def margins(base, x, y, rho, **kwargs):
    kwargs = {"vertices": "all", **kwargs}
    return RUBModel(base, **kwargs).worst_case_margins(x, y, rho=rho).numpy()


def clean_margins(base, x, y):
    logits = base(x).numpy()
    return logits - np.take_along_axis(logits, y[:, None], axis=1)


def loss_and_gradient(base, y, worst_case):
    weights = [weight.value for weight in base.trainable_weights]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, worst_case())
        )
    gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
    flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
    return float(loss), tf.concat(flat, axis=0).numpy()


# The published formula -------------------------------------------------------


@pytest.mark.parametrize(
    "beginning",
    [
        [layers.Input((6,)), layers.Dense(4)],
        [layers.Input((2, 3)), layers.Flatten(), layers.Dense(4)],
        [
            layers.Input((2, 3)),
            layers.Normalization(
                mean=[1.0, 2.0, 3.0], variance=[4.0, 1.0, 9.0]
            ),
            layers.Permute((2, 1)),
            layers.Reshape((6,)),
            layers.Dense(4, use_bias=False),
        ],
        [layers.Input((6,)), layers.Dense(4), layers.Rescaling(0.5)],
        [layers.Input((2, 3)), layers.Dense(4)],  # along the last axis
    ],
)
def test_response_of_the_first_layer(beginning, rng):
    """What moving each feature does, however the map is put together."""
    start = keras.Sequential(beginning)
    end = [layers.ReLU(), layers.Flatten(), layers.Dense(3)]
    base = keras.Sequential([*beginning, *end])
    x = rng.normal(size=(2, *base.input_shape[1:])).astype("float32")
    problem = Problem.of(base, PerturbationSet(1))
    bound = problem.vertex_bound(
        tf.constant(x), tf.zeros(2, tf.int32), tf.constant(1.0)
    )
    eye = np.eye(6, dtype="float32").reshape(6, *x.shape[1:])
    moved = np.asarray(start(x[:1] + eye) - start(x[:1])).reshape(6, -1)
    assert_allclose(bound.start.response, moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_loss_and_gradient_are_those_of_the_paper(name, rng):
    base = network(name, rng)
    x, y = data(base, rng)
    model = RUBModel(base, vertices="all")
    for rho in RADII:
        loss, gradient = loss_and_gradient(
            base, y, lambda rho=rho: model.worst_case_margins(x, y, rho=rho)
        )
        # At radius 0 the reference has only ties: the clean loss is sharper.
        expected_loss, expected = loss_and_gradient(
            base,
            y,
            lambda rho=rho: plain_margins(base, x, y, rho) if rho else base(x),
        )
        assert_allclose(loss, expected_loss, rtol=1e-5)
        error = np.linalg.norm(gradient - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), rho


@pytest.mark.parametrize("name", ["deep", "pool"])
def test_mask_and_weights_remove_and_scale_vertices(name, rng):
    base = network(name, rng)
    x, y = data(base, rng)
    shape = base.input_shape[1:]
    limits = {
        "mask": rng.uniform(size=shape) < 0.5,
        "weights": rng.uniform(0.3, 3.0, shape),
    }
    for kwargs in (
        {"mask": limits["mask"]},
        {"weights": limits["weights"]},
        limits,
    ):
        assert_allclose(
            margins(base, x, y, 2.0, **kwargs),
            plain_margins(base, x, y, 2.0, **kwargs),
            rtol=1e-5,
            atol=1e-5,
        )


# What must hold of any such bound --------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_radius_zero_is_clean_and_margins_grow_with_the_radius(name, rng):
    base = network(name, rng)
    x, y = data(base, rng)
    model = RUBModel(base, vertices="all")
    rising = [model.worst_case_margins(x, y, rho=rho).numpy() for rho in RADII]
    assert_allclose(rising[0], clean_margins(base, x, y), atol=1e-5)
    for lower, higher in zip(rising, rising[1:], strict=False):
        assert np.all(higher >= lower - 1e-5)
    assert np.all(rising[-1][np.arange(3), y] == 0)


@pytest.mark.parametrize("kwargs", [{}, {"input_range": (0, 1)}])
@pytest.mark.parametrize("vertices", ["all", 2])
def test_nothing_free_to_move_gives_clean_margins(kwargs, vertices, rng):
    base = network("deep", rng)
    x, y = data(base, rng)
    assert_allclose(
        margins(base, x, y, 5.0, mask=False, vertices=vertices, **kwargs),
        clean_margins(base, x, y),
        atol=1e-5,
    )


@pytest.mark.parametrize("kwargs", [{}, {"input_range": (0, 1)}])
@pytest.mark.parametrize(
    ("name", "budgets"), [("deep", [1, 2_500]), ("pool", [300_000, 2**30])]
)
def test_chunks_and_batches_change_nothing(name, budgets, kwargs, rng):
    base = network(name, rng)
    x, y = data(base, rng, count=5)
    radii = np.linspace(0.0, 4.0, 5)
    expected = margins(base, x, y, radii, **kwargs)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for budget in budgets:
        found = margins(base, x, y, radii, memory_budget=budget, **kwargs)
        assert_allclose(found, expected, **close)
    model = RUBModel(base, vertices="all", **kwargs)
    one_by_one = [
        model.worst_case_margins(x[i : i + 1], y[i : i + 1], rho=radii[i])
        for i in range(5)
    ]
    assert_allclose(np.concatenate(one_by_one), expected, **close)


@pytest.mark.eager
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolution_equals_its_dense_form(padding, rng):
    shape = (5, 4, 2)
    conv = layers.Conv2D(3, 3, strides=(2, 1), padding=padding)
    tail = [layers.Dense(4, "relu"), layers.Dense(3)]
    as_conv = sequential(
        shape, [conv, layers.ReLU(), layers.Flatten(), *tail], rng
    )
    size = int(np.prod(shape))
    units = tf.reshape(tf.eye(size), [size, *shape])
    offset = tf.reshape(conv(0 * units[:1]), [-1])
    matrix = tf.reshape(conv(units), [size, -1]) - offset
    first = layers.Dense(offset.shape[0], "relu")
    as_dense = keras.Sequential([keras.Input((size,)), first, *tail])
    first.set_weights([matrix, offset])
    x, y = data(as_conv, rng)
    for rho in (0.3, 3.0):
        assert_allclose(
            margins(as_conv, x, y, rho),
            margins(as_dense, x.reshape(3, size), y, rho),
            rtol=1e-4,
            atol=1e-5,
        )


def test_order_of_features_and_of_classes_does_not_matter(rng):
    base = network("deep", rng)
    x, y = data(base, rng)
    expected = margins(base, x, y, 1.5)
    first, last = base.layers[0], base.layers[-1]

    features = rng.permutation(4)
    kernel, bias = first.get_weights()
    first.set_weights([kernel[features], bias])
    found = margins(base, x[:, features], y, 1.5)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    first.set_weights([kernel, bias])

    classes = np.array([2, 0, 1])
    kernel, bias = last.get_weights()
    last.set_weights([kernel[:, classes], bias[classes]])
    found = margins(base, x, np.argsort(classes)[y], 1.5)
    assert_allclose(found, expected[:, classes], rtol=1e-5, atol=1e-5)


# The valid input range -------------------------------------------------------


def knapsack(values, caps):
    """The mixture of vertices, solved as the linear program that it is.

    Args:
        values: array [batch, 1 + V, K], the clean input first.
        caps: array [batch, V].
    """
    batch, _, classes = values.shape
    result = np.empty([batch, classes])
    for sample in range(batch):
        limits = list(zip(0 * caps[sample], caps[sample], strict=True))
        for k in range(classes):
            clean, *vertices = values[sample, :, k].astype("float64")
            gains = np.array(vertices) - clean
            solution = linprog(
                -gains, np.ones([1, gains.size]), [1.0], bounds=limits
            )
            result[sample, k] = clean - solution.fun
    return result


@pytest.mark.parametrize("name", ["deep", "pool"])
def test_valid_range_is_a_fractional_knapsack(name, rng):
    base = network(name, rng)
    x, y = data(base, rng, count=2)
    x[0, 0] = 1.0  # no room upwards
    shape = base.input_shape[1:]
    weights = rng.uniform(0.5, 2.0, shape)
    mask = rng.uniform(size=shape) < 0.8
    free = np.flatnonzero(mask)
    for rho in (0.0, 0.4, 3.0, 30.0):
        plain = margins(base, x, y, rho, mask=mask, weights=weights)
        found = margins(
            base, x, y, rho, mask=mask, weights=weights, input_range=(0, 1)
        )
        assert np.all(found <= plain + 1e-5 * (1 + np.abs(plain)))
        flat, cost = x.reshape(2, -1), weights.reshape(-1)[free]
        up, down = 1 - flat[:, free], flat[:, free]
        # No move within the range is longer than this.
        longest = (np.maximum(up, down) * cost).sum(axis=1)
        room = np.concatenate([up, down], axis=1)
        for i, radius in enumerate(np.minimum(rho, longest)):
            values = vertex_margins(
                base, x[i : i + 1], y[i : i + 1], radius, mask, weights
            ).numpy()
            caps = np.tile(cost, 2) * room[i : i + 1] / max(radius, 1e-9)
            assert_allclose(
                found[i : i + 1],
                knapsack(values, np.minimum(1.0, caps)),
                rtol=1e-4,
                atol=1e-4,
            )


def test_wide_valid_range_changes_nothing(rng):
    base = network("deep", rng)
    x, y = data(base, rng)
    for rho in (0.5, 30.0):
        assert_allclose(
            margins(base, x, y, rho, input_range=(-1e3, 1e3)),
            margins(base, x, y, rho),
            rtol=1e-5,
        )


def test_a_mixture_of_few_vertices_stays_an_upper_bound(rng, monkeypatch):
    base = network("conv", rng)
    x, y = data(base, rng)
    plain = margins(base, x, y, 8.0)
    exact = margins(base, x, y, 8.0, input_range=(0, 1))
    monkeypatch.setattr(vertices, "_MIXED_VERTICES", 3)
    short = margins(base, x, y, 8.0, input_range=(0, 1))
    assert np.all(short >= exact - 1e-5) and np.any(short > exact + 1e-3)
    assert np.all(short <= plain + 1e-5)


@pytest.mark.parametrize("vertices", ["all", 4])
def test_gradient_with_valid_range_is_that_of_the_loss(vertices, rng):
    base = network("deep", rng)
    x, y = data(base, rng)
    model = RUBModel(base, vertices=vertices, input_range=(0, 1))

    def loss():
        return loss_and_gradient(
            base, y, lambda: model.worst_case_margins(x, y, rho=2.0)
        )

    _, gradient = loss()
    assert np.all(np.isfinite(gradient)) and np.any(gradient)
    kernel = base.layers[0].kernel
    start = kernel.numpy()
    direction = rng.normal(size=start.shape)
    ends = []
    for step in (1e-3, -1e-3):
        kernel.assign(start + step * direction)
        ends.append(loss()[0])
    slope = np.sum(gradient[: start.size] * direction.reshape(-1))
    assert_allclose(slope, (ends[0] - ends[1]) / 2e-3, rtol=2e-2)


# Screening -------------------------------------------------------------------


@pytest.mark.parametrize("input_range", [None, (0, 1)])
@pytest.mark.parametrize("name", ["deep", "pool"])
def test_screened_vertices_are_a_subset(name, input_range, rng):
    base = network(name, rng)
    x, y = data(base, rng)
    kwargs = {"input_range": input_range}
    radii = np.array([0.0, 0.5, 5.0])
    exact = margins(base, x, y, radii, **kwargs)
    for count in (1, 3):
        found = margins(base, x, y, radii, vertices=count, **kwargs)
        assert np.all(found <= exact + 1e-5 * (1 + np.abs(exact)))
        assert np.all(found >= clean_margins(base, x, y) - 1e-5)
    every = 2 * x[0].size
    found = margins(base, x, y, radii, vertices=every, **kwargs)
    assert_allclose(found, exact, rtol=1e-6)


def test_sixteen_screened_vertices_are_enough_for_training(rng):
    centers = rng.normal(size=(3, 30))
    y = np.arange(192) % 3
    x = (centers[y] + rng.normal(size=(192, 30))).astype("float32")
    base = sequential(
        (30,),
        [layers.Dense(16, "relu"), layers.Dense(16, "relu"), layers.Dense(3)],
        rng,
    )
    model = RUBModel(base, rho=1.0)
    model.compile("adam", loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, epochs=5, verbose=0)
    for rho in (0.3, 1.0, 3.0):
        screened, exact = (
            np.mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    y, margins(base, x, y, rho, vertices=count)
                )
            )
            for count in (16, "all")
        )
        assert 0.98 * exact <= screened <= exact * (1 + 1e-5)


# First layers, up to and without the first activation.
HEADS = {
    "dense": ((4,), lambda: [layers.Dense(5)]),
    "conv": ((5, 4, 2), lambda: [layers.Conv2D(3, 3)]),
    "conv same": (
        (5, 4, 2),
        lambda: [layers.Conv2D(3, (2, 3), padding="same")],
    ),
    "rescaling, conv, batch norm": (
        (6, 5, 1),
        lambda: [
            layers.Rescaling(-0.7, 0.1),
            layers.Conv2D(3, 3, strides=2),
            layers.BatchNormalization(),
        ],
    ),
    "normalization, conv same, batch norm": (
        (5, 5, 2),
        lambda: [
            layers.Normalization(mean=[0.1, 0.2], variance=[0.5, 2.0]),
            layers.Conv2D(2, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
        ],
    ),
    "padding, dilated conv": (
        (4, 4, 1),
        lambda: [
            layers.ZeroPadding2D(((1, 0), (2, 1))),
            layers.Conv2D(3, 2, dilation_rate=2),
        ],
    ),
    "reshape, causal conv": (
        (6,),
        lambda: [
            layers.Reshape((3, 2)),
            layers.Conv1D(3, 2, padding="causal"),
        ],
    ),
    "conv, flatten": (
        (4, 4, 1),
        lambda: [layers.Conv2D(2, 3), layers.Flatten()],
    ),
    "conv, permute": (
        (4, 4, 1),
        lambda: [layers.Conv2D(2, 3), layers.Permute((2, 1, 3))],
    ),
    "conv, padding": (
        (4, 4, 1),
        lambda: [layers.Conv2D(2, 3), layers.ZeroPadding2D(1)],
    ),
    "conv, cropping": (
        (5, 5, 1),
        lambda: [layers.Conv2D(2, 3), layers.Cropping2D(1)],
    ),
    "conv, batch norm of rows": (
        (5, 4, 1),
        lambda: [layers.Conv2D(2, 3), layers.BatchNormalization(axis=1)],
    ),
}


# One convolution between maps of single features: scored by its windows.
LOCAL = {
    "conv",
    "conv same",
    "rescaling, conv, batch norm",
    "normalization, conv same, batch norm",
    "padding, dilated conv",
}


def expected_scores(head, tail, x, y, rho, mask, weights):
    """First layers exact, the majorant of the others by its gradient."""

    def run(t):
        for layer in head:
            t = layer(t, training=False)
        return t

    points = l1_vertices(tf.constant(x), rho, mask, weights)
    batch, copies = points.shape[:2]
    clean = run(x)
    moved = run(tf.reshape(points, [-1, *x.shape[1:]]))
    moved = tf.reshape(moved, [batch, copies, *clean.shape[1:]])[:, 1:]
    slope = tf.cast(clean > 0, tf.float32)
    upper, negative = slope * clean, -slope * clean
    scores = []
    for k in range(tail[-1].units):
        with tf.GradientTape() as tape:
            tape.watch([upper, negative])
            margin = from_halfway(tail, upper, upper, negative, y, 1)[..., k]
        by_upper, by_negative = tape.gradient(margin, [upper, negative])
        change = by_upper[:, None] * (tf.nn.relu(moved) - upper[:, None])
        change += by_negative[:, None] * (
            -slope[:, None] * moved - negative[:, None]
        )
        scores.append(tf.reduce_sum(change, axis=range(2, change.ndim)))
    scores = np.stack(scores, axis=-1)
    others = (y[:, None] + np.arange(1, scores.shape[-1])) % scores.shape[-1]
    return np.take_along_axis(scores, others[:, None], axis=-1)


@pytest.mark.parametrize("widest", [0, 4096], ids=["local", "matrix"])
@pytest.mark.parametrize("name", HEADS)
def test_scores_are_exact_first_layer_and_linear_rest(
    name, widest, rng, monkeypatch
):
    shape, make = HEADS[name]
    head = make()
    tail = [layers.Flatten(), layers.Dense(4, "relu"), layers.Dense(3)]
    base = sequential(shape, [*head, layers.ReLU(), *tail], rng)
    x, y = data(base, rng)
    mask = weights = None
    if name != "conv":
        mask = rng.uniform(size=shape) < 0.6
        weights = rng.uniform(0.5, 2.0, shape)
    monkeypatch.setattr(first_layer, "WIDEST_MATRIX", widest)
    attacker = PerturbationSet(1, mask=mask, weights=weights)
    problem = Problem.of(base, attacker)
    radii = np.array([0.3, 1.0, 4.0], "float32")
    bound = problem.vertex_bound(tf.constant(x), y, radii)
    assert (bound.start is None) == (widest == 0)
    scores = screening.scores(bound).numpy()
    gains = (
        bound.at(tf.range(bound.num_vertices))
        - bound.relaxation.clean_margins[:, None]
    ).numpy()
    assert np.all(scores <= gains + 1e-5 * (1 + np.abs(gains)))
    if widest or name in LOCAL:  # else a coarser score will do
        expected = expected_scores(head, tail, x, y, radii, mask, weights)
        assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
