"""Drawn competitors: what a training step looks at in place of all classes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_rub
from keras_rub.bounds import kinks, screening
from keras_rub.bounds.competitors import Competitors, draw
from keras_rub.bounds.maxima import places_of_largest
from keras_rub.bounds.problem import Problem

X = np.random.default_rng(0).uniform(size=(6, 5)).astype("float32")
Y = np.array([0, 1, 2, 3, 0, 1])


def network(classes=4, seed=1):
    keras.utils.set_random_seed(seed)
    return keras_rub.models.mlp([5], classes, (8, 8))


def step_of(model, x=X, y=Y):
    """A compiled function: robust loss and flat gradient of one draw."""

    @tf.function
    def step():
        labels, rho = tf.constant(y, tf.int32), tf.constant(0.5)
        found = model.search(tf.constant(x), labels, rho, training=True)
        with tf.GradientTape() as tape:
            outputs = model.robust_outputs(tf.constant(x), labels, rho, found)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)

    return lambda: tuple(part.numpy() for part in step())


@pytest.mark.parametrize("count", [1, 2])
def test_gradient_of_a_draw_is_unbiased(count):
    """With all vertices every margin is valued: only the gradient is drawn."""
    base = network()
    settings = {"vertices": "all"}
    loss, gradient = step_of(
        keras_rub.RUBModel(base, competitors="all", **settings)
    )()
    step = step_of(keras_rub.RUBModel(base, competitors=count, **settings))
    draws = 1500
    losses, gradients = zip(*(step() for _ in range(draws)), strict=True)
    np.testing.assert_allclose(losses, loss, rtol=1e-5)
    mean = np.mean(gradients, axis=0)
    error = np.std(gradients, axis=0) / np.sqrt(draws)
    assert error.max() > 1e-4, "the gradient must depend on the draw"
    assert np.all(np.abs(mean - gradient) < 5 * error + 1e-5)


@pytest.mark.eager
@pytest.mark.parametrize(
    "make",
    [
        keras_rub.RUBModel,
        keras_rub.ARUBModel,
        lambda base, **kw: keras_rub.RUBModel(base, vertices="all", **kw),
        lambda base, **kw: keras_rub.RUBModel(
            base, input_range=(0.0, 1.0), mask=[1, 1, 0, 1, 1], **kw
        ),
    ],
    ids=["rub", "arub", "all vertices", "range and mask"],
)
def test_two_classes_have_one_competitor(make):
    base, y = network(2), Y % 2
    drawn = step_of(make(base, competitors=1), y=y)()
    everyone = step_of(make(base, competitors="all"), y=y)()
    for one, two in zip(drawn, everyone, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_only_training_draws():
    base = network()
    margins = [
        keras_rub.RUBModel(base, competitors=count).worst_case_margins(X, Y)
        for count in (1, 2, "all")
    ]
    np.testing.assert_array_equal(margins[0], margins[2])
    np.testing.assert_array_equal(margins[1], margins[2])
    model = keras_rub.RUBModel(base, 0.3)
    model.compile("sgd", "sparse_categorical_crossentropy")
    losses = {
        model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
        for _ in range(3)
    }
    assert len(losses) == 1
    again = type(model).from_config(model.get_config())
    assert again.competitors == 1


@pytest.mark.eager
@pytest.mark.parametrize(
    "make",
    [
        keras_rub.RUBModel,
        lambda base: keras_rub.RUBModel(base, vertices="all"),
        keras_rub.ARUBModel,
        lambda base: keras_rub.PGDModel(base, steps=1, restarts=2),
        lambda base: keras_rub.IBPModel(base, bound_weight=0.5),
    ],
    ids=["rub", "all vertices", "arub", "pgd", "ibp"],
)
def test_a_resumed_training_draws_what_it_would_have(make):
    def gradient_at(step, seed=1):
        model = make(network(seed=seed))
        model.base.set_weights(weights)
        model.compile(
            keras.optimizers.SGD(1.0), "sparse_categorical_crossentropy"
        )
        model.optimizer.iterations.assign(step)
        model.train_on_batch(X, Y)
        return np.concatenate([w.ravel() for w in model.get_weights()])

    weights = network().get_weights()
    first = gradient_at(3)
    np.testing.assert_array_equal(gradient_at(3), first)
    # Other steps and other seeds draw otherwise.
    assert any(np.any(gradient_at(step) != first) for step in range(4, 8))
    assert any(np.any(gradient_at(3, seed) != first) for seed in range(2, 6))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "some"])
def test_bad_number_of_competitors(wrong):
    for wrap in (keras_rub.RUBModel, keras_rub.ARUBModel):
        with pytest.raises(ValueError, match="`competitors` must be .*Receiv"):
            wrap(network(), competitors=wrong)


@pytest.mark.parametrize("replace", [True, False])
def test_draws_follow_the_margins(replace):
    margins = tf.repeat(tf.constant([[2.0, 0.0, -30.0]]), 20000, axis=0)
    drawn, shares = draw(margins, 1, replace)
    soft = np.exp([2.0, 0.0, -30.0])
    expected = 0.8 * soft / soft.sum() + 0.2 / 3
    found = np.bincount(drawn.numpy()[:, 0], minlength=3) / 20000
    np.testing.assert_allclose(found, expected, atol=0.02)
    np.testing.assert_allclose(
        shares[:, 0], expected[drawn.numpy()[:, 0]], rtol=1e-5
    )
    several, _ = draw(margins[:50], 3, replace=False)
    np.testing.assert_array_equal(
        np.sort(several.numpy(), axis=1), np.tile([0, 1, 2], (50, 1))
    )


def test_lift_of_drawn_competitors():
    some = Competitors(
        tf.constant([1, 0]), 4, drawn=tf.constant([[0, 2], [1, 2]])
    )
    np.testing.assert_array_equal(some.classes, [[2, 0], [2, 3]])
    margins = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    lifted = some.lift(margins, tf.constant([[1.0, 3.0], [0.5, 0.5]]))
    np.testing.assert_allclose(lifted, [[2.0, 4.0, 6.0], [4.5, 5.5, 6.5]])


@pytest.mark.parametrize("rays", [(0.0, 1.0), (0.2, 1.0)])
def test_table_of_bends(rays, rng):
    """Exact where nothing bends, and near by where something does."""
    rows, moves, width = 5, 40, 7
    clean, drop = rng.normal(size=(2, rows, width)).astype("float32")
    upper = rng.uniform(size=(rows, width)).astype("float32")
    response = rng.normal(size=(moves, width)).astype("float32")

    def exact(scale):
        def f(z):
            return np.where(z > 0, rays[1] * z, rays[0] * z)

        shift = scale[:, None] * response[None]  # [rows, moves, width]
        z, u, d = clean[:, None], upper[:, None], drop[:, None]
        return [
            (u * (f(z + s) - f(z)) - d * s).sum(axis=-1)
            for s in (shift, -shift)
        ]

    def found(scale):
        return kinks.gains(clean, upper, drop, scale, response, rays)

    small = np.full((rows, 1), 1e-4, "float32")
    for one, two in zip(found(small), exact(small), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-6)
    large = np.array([[0.0], [0.3], [1.0], [3.0], [30.0]], "float32")
    for one, two in zip(found(large), exact(large), strict=True):
        error = np.abs(one - two).max(axis=1)
        assert np.all(error <= 0.1 * np.abs(two).max(axis=1) + 1e-6)


@pytest.mark.parametrize("size", [40, 1000, 1024])
def test_places_of_the_largest(size, rng):
    """Whole rows, and rows that are cut into blocks."""
    values = rng.normal(size=(6, size)).astype("float32")
    values[0] = -np.inf
    values[0, -1] = -7.0  # alone
    values[1, 3:7] = [11.0, 14.0, 13.0, 12.0]  # all in one block
    for count in (1, 4):
        found = places_of_largest(tf.constant(values), count).numpy()
        best = -np.sort(-values, axis=1)[:, :count]
        taken = np.take_along_axis(values, found, axis=1)
        np.testing.assert_array_equal(taken, best)
        assert all(len(set(row)) == count for row in found)
    assert found[1].tolist() == [4, 5, 6, 3]


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_rough_scores_find_good_vertices(kind, rng):
    """The best vertex of the table is nearly the best of all."""
    if kind == "dense":
        base = keras_rub.models.mlp([20], 5, (16, 16))
    else:
        base = keras.Sequential(
            [
                keras.layers.Input((6, 6, 1)),
                keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(5),
            ]
        )
    shape = base.input_shape[1:]
    x = rng.normal(size=(8, *shape)).astype("float32")
    labels = rng.integers(0, 5, 8).astype("int32")
    drawn = rng.integers(0, 4, (8, 1)).astype("int32")
    problem = Problem.of(base, keras_rub.PerturbationSet(1))
    bound = problem.vertex_bound(
        tf.constant(x), tf.constant(labels), tf.constant(1.0), drawn=drawn
    )
    values = bound.at(tf.range(bound.num_vertices)).numpy()[..., 0]
    best = values.max(axis=1)
    chosen = screening.screen(bound, 1).numpy()[:, 0]
    reached = values[np.arange(8), chosen]
    clean = bound.relaxation.clean_margins.numpy()[:, 0]
    assert np.all(reached - clean >= 0.7 * (best - clean))
    assert np.mean(chosen == values.argmax(axis=1)) >= 0.5


def test_training_with_every_limit(rng):
    base = network()
    model = keras_rub.RUBModel(
        base,
        0.3,
        input_range=(0.0, 1.0),
        mask=[True, True, False, True, True],
        weights=[1.0, 2.0, 1.0, 0.5, 1.0],
    )
    model.compile(
        keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy"
    )
    history = model.fit(
        np.tile(X, (10, 1)),
        np.tile(Y, 10),
        sample_weight=rng.uniform(0.5, 1.5, 60),
        epochs=12,
        verbose=0,
    ).history
    assert np.all(np.isfinite(history["loss"]))
    assert history["loss"][-1] < 0.8 * history["loss"][0]
