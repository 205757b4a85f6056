"""Certificates: sound, ordered, complete, and clear about bad input."""

import collections
import functools
import json

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import keras_rub
from keras_rub.bounds import branching, decision, methods, radii
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.bounds.majorant import Relaxation
from tests import sampling

METHODS = (
    "rub", "alpha-rub", "crown", "coap", "ibp", "crown-ibp", "alpha-crown",
    "auto",
)  # fmt: skip

# Bounds that a million points are held against, beside "auto".
MILLION = ("ibp", "crown-ibp", "crown", "alpha-crown")


@functools.cache
def network(kind):
    """Small networks; tests give them new weights, not new graphs."""
    if kind == "mlp":
        return keras.Sequential(
            [
                layers.Input((5,)),
                layers.Dense(7, activation="relu"),
                layers.Dense(6, activation="relu"),
                layers.Dense(3),
            ]
        )
    if kind == "smooth":
        return keras.Sequential(
            [
                layers.Input((4,)),
                layers.Rescaling(-0.5, 0.1),
                layers.Dense(6, activation="softplus"),
                layers.Dense(5),
                layers.LeakyReLU(negative_slope=0.1),
                layers.Dense(4, activation="elu"),
                layers.Dense(2),
            ]
        )
    if kind == "cnn":
        return keras.Sequential(
            [
                layers.Input((6, 6, 1)),
                layers.Conv2D(3, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(4, 2),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(5, activation="relu"),
                layers.Dense(3),
            ]
        )
    if kind == "strided":  # CROWN substitutes on windows here
        return keras.Sequential(
            [
                layers.Input((9, 9, 1)),
                layers.Conv2D(2, 3, strides=2, activation="relu"),
                layers.Conv2D(3, 2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
    inputs = layers.Input((4,))
    h = layers.Dense(6, activation="relu")(inputs)
    r = layers.Dense(6, activation="relu")(h)
    h = layers.Add()([h, layers.Dense(6)(r)])
    h = layers.Concatenate()([layers.ReLU()(h), inputs])
    return keras.Model(inputs, layers.Dense(3)(h))


def randomise(model, seed, scale=1.0):
    """New weights of a healthy size, biases and statistics included."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        shape = weight.shape
        fan = np.prod(shape[:-1]) if len(shape) > 1 else 4.0
        value = scale * rng.normal(size=shape) / np.sqrt(fan)
        if "variance" in weight.path:
            value = rng.uniform(0.5, 2.0, shape)
        weight.assign(value)
    return rng


def samples(model, rng, count=3, low=0.0, high=1.0):
    """Inputs, and the classes that the model gives them."""
    x = rng.uniform(low, high, (count, *model.input_shape[1:]))
    x = x.astype("float32")
    return x, np.asarray(model(x, training=False)).argmax(1)


def try_to_break(model, x, y, result, rho, norm, rng, count=150, **limits):
    """Asserts that no reachable point is beyond the bound; counts them."""
    tried = 0
    for i in range(len(x)):
        points = sampling.reachable(rng, x[i], rho, norm, count=count, **limits)
        if not limits:
            found = sampling.ascend(model, x[i], y[i], rho, norm)
            points = np.concatenate([points, found])
        margins = sampling.margins(model, points, y[i])
        slack = 1e-4 * (1.0 + np.abs(margins).max())
        assert np.all(margins <= result.margins[i] + slack)
        if result.certified[i]:
            margins[:, y[i]] = -np.inf
            assert np.all(margins < 0.0)
        tried += len(points)
    return tried


@pytest.mark.eager
@hypothesis.given(
    kind=st.sampled_from(["mlp", "smooth", "cnn", "residual"]),
    norm=st.sampled_from([1, 2, "inf"]),
    method=st.sampled_from(METHODS),
    rho=st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_never_unsound(kind, norm, method, rho, seed):
    if method in ("rub", "alpha-rub"):
        norm = 1
    model = network(kind)
    rng = randomise(model, seed)
    x, y = samples(model, rng)
    result = keras_rub.certify(
        model, x, y, rho=rho, norm=norm, method=method, verbose=0
    )
    try_to_break(model, x, y, result, rho, norm, rng)


@pytest.mark.eager
@pytest.mark.medium
@hypothesis.given(
    kind=st.sampled_from(["mlp", "residual"]),
    method=st.sampled_from(METHODS),
    norm=st.sampled_from([1, 2, "inf"]),
    limits=st.sampled_from(
        [
            {"input_range": (0.0, 1.0)},
            {"mask": [1, 0, 1, 0]},
            {"mask": [0, 1, 1, 0], "input_range": (0.0, 1.0)},
            {"weights": [1.0, 2.0, 0.5, 4.0]},
        ]
    ),
    rho=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_never_unsound_within_limits(kind, method, norm, limits, rho, seed):
    if method in ("rub", "alpha-rub"):
        norm = 1
    model = network(kind)
    rng = randomise(model, seed)
    x, y = samples(model, rng)
    size = model.input_shape[-1]
    limits = {
        name: np.resize(value, size) if name != "input_range" else value
        for name, value in limits.items()
    }
    result = keras_rub.certify(
        model, x, y, rho=rho, norm=norm, method=method, verbose=0, **limits
    )
    try_to_break(model, x, y, result, rho, norm, rng, **limits)


@pytest.mark.slow
def test_never_unsound_on_a_million_points():
    """Each point is held against every bound that can do its norm."""
    tried, certified = collections.Counter(), collections.Counter()
    for seed in range(20):
        for kind in ("mlp", "smooth", "cnn", "strided", "residual"):
            for norm in (1, 2, "inf"):
                model = network(kind)
                rng = randomise(model, seed)
                x, y = samples(model, rng)
                rho = float(rng.choice([0.05, 0.3, 1.0, 3.0]))
                start = rng.integers(2**31)
                for method in ("auto", *MILLION):
                    result = keras_rub.certify(
                        model, x, y, rho=rho, norm=norm, method=method,
                        verbose=0,
                    )  # fmt: skip
                    tried[method] += try_to_break(
                        model, x, y, result, rho, norm,
                        np.random.default_rng(start), count=1500,
                    )  # fmt: skip
                    certified[method] += result.certified.sum()
    for method, count in tried.items():
        print(f"\n{method}: {count} points, 0 violations")
        assert count >= 1_000_000
        assert certified[method] > 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_planted_counterexample(method, dtype):
    """One vertex, and no other point, is misclassified."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    kernel = np.zeros((4, 2), "float32")
    kernel[:, 1] = [0.5, -1.0, 2.0, 0.25]
    x = np.array([[0.3, 0.1, -0.2, 0.7]], "float32")
    rho = 0.8
    # The margin at x + rho e_2 is exactly 0; all others are below it.
    bias = -float(x[0] @ kernel[:, 1] + rho * 2.0)
    model.set_weights([kernel, np.array([0.0, bias], "float32")])
    settings = {"method": method, "dtype": dtype, "verbose": 0}
    at = keras_rub.certify(model, x, [0], rho=rho, **settings)
    assert not at.certified[0]
    above = keras_rub.certify(model, x, [0], rho=rho * 1.001, **settings)
    assert not above.certified[0] and above.margins[0, 1] > 0
    below = keras_rub.certify(model, x, [0], rho=rho * 0.999, **settings)
    assert below.certified[0]


@pytest.mark.medium
@hypothesis.given(
    kind=st.sampled_from(["mlp", "residual"]),
    rho=st.sampled_from([0.1, 0.5, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_order_of_the_methods(kind, rho, seed):
    model = network(kind)
    x, y = samples(model, randomise(model, seed))
    found = {
        (method, limited): keras_rub.certify(
            model,
            x,
            y,
            rho=rho,
            method=method,
            input_range=(0.0, 1.0) if limited else None,
            verbose=0,
        )
        for method in ("rub", "alpha-rub", "crown", "auto")
        for limited in (False, True)
    }
    slack = 1e-5
    for limited in (False, True):
        auto = found["auto", limited]
        for method in ("rub", "alpha-rub", "crown"):
            other = found[method, limited]
            assert np.all(auto.margins <= other.margins + slack)
            assert np.all(auto.certified >= other.certified)
        assert np.all(
            found["alpha-rub", limited].margins
            <= found["rub", limited].margins + slack
        )
    for method in ("rub", "crown"):
        assert np.all(
            found[method, True].margins <= found[method, False].margins + 1e-4
        )


@pytest.mark.eager
@hypothesis.given(
    kind=st.sampled_from(["mlp", "cnn"]),
    limited=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_monotone_in_radius_and_mask(kind, limited, seed):
    model = network(kind)
    rng = randomise(model, seed)
    x, y = samples(model, rng)
    settings = {
        "method": "rub",
        "input_range": (0.0, 1.0) if limited else None,
        "verbose": 0,
    }
    table = keras_rub.certify(
        model, x, y, rho=[0.0, 0.1, 0.3, 1.0, 3.0], **settings
    )
    for smaller, larger in zip(table[:-1], table[1:], strict=True):
        assert np.all(smaller.margins <= larger.margins + 1e-4)
        assert np.all(smaller.certified >= larger.certified)
    mask = np.zeros(x.shape[1:], bool)
    mask.flat[::2] = True
    some = keras_rub.certify(model, x, y, rho=1.0, mask=mask, **settings)
    assert np.all(some.margins <= table[3].margins + 1e-4)
    assert np.all(some.certified >= table[3].certified)


def test_rub_is_the_bound_that_the_model_trains_on(rng):
    model = keras_rub.RUBModel(network("mlp"), vertices="all")
    randomise(model.base, 1)
    x, y = samples(model.base, rng, count=20)
    found = keras_rub.certify(model, x, y, rho=0.4, method="rub")
    expected = model.worst_case_margins(x, y, rho=0.4)
    np.testing.assert_allclose(found.margins, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_deciding_only_changes_no_decision(kind, limited):
    model = network(kind)
    rng = randomise(model, 3, scale=1.5)
    x, y = samples(model, rng, count=24)
    for method in ("rub", "auto"):
        for rho in (0.05, 0.2, 0.6):
            settings = {
                "rho": rho,
                "method": method,
                "batch_size": 10,
                "input_range": (0.0, 1.0) if limited else None,
            }
            full = keras_rub.certify(model, x, y, **settings)
            fast = keras_rub.certify(model, x, y, decide_only=True, **settings)
            np.testing.assert_array_equal(full.certified, fast.certified)
            if method == "rub":
                assert np.all(fast.margins >= full.margins - 1e-4)


def chain(features, hidden, classes, activation):
    return keras.Sequential(
        [
            layers.Input((features,)),
            *(layers.Dense(width, activation=activation) for width in hidden),
            layers.Dense(classes),
        ]
    )


def compare_with_full_scan(model, x, rho, memory_budget=2**26, **limits):
    """Asserts that `settle` finds what all vertices together give."""
    attacker = keras_rub.PerturbationSet(1, **limits)
    problem = compiled_bounds(
        model, attacker, memory_budget=memory_budget
    ).problem
    x, rho = tf.constant(x, tf.float32), tf.constant(rho, tf.float32)
    labels = tf.argmax(problem.logits(x), axis=-1, output_type=tf.int32)
    inputs = (x, labels, rho)
    full = problem.vertex_bound(*inputs).worst_case().margins.numpy()
    found = decision.settle(problem, methods.METHODS["rub"], *inputs)
    margins = found.margins.numpy()
    tolerance = 1e-5 * np.maximum(np.abs(full), 1)
    assert np.all(margins >= full - tolerance)
    largest, allowed = margins.max(axis=1), full.max(axis=1)
    np.testing.assert_allclose(largest, allowed, rtol=1e-5, atol=1e-6)
    allowance = problem.allowance(*inputs)
    np.testing.assert_array_equal(
        found.proved, decision.is_proved(full, allowance)
    )
    return np.asarray(found.proved)


@pytest.fixture
def small_batches(monkeypatch):
    """Prunes batches that are too small for it to pay."""
    monkeypatch.setattr(branching, "_FEWEST", 0)


CHAINS = {
    "relu": (6, (12, 10), 4, "relu"),
    "deep": (6, (9, 9, 9), 3, "relu"),
    "leaky": (5, (9, 8), 3, "leaky_relu"),
    "elu": (5, (9, 8), 3, "elu"),
    "one feature": (1, (8, 7), 3, "relu"),
    "two classes": (5, (8,), 2, "relu"),
}
RADII = (0.0, 1e-6, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 1e4)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.eager
@pytest.mark.parametrize("most_left", [-1.0, 2.0], ids=["scan", "prune"])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", CHAINS)
def test_largest_margin_needs_few_vertices(
    kind, limited, most_left, monkeypatch
):
    """The first samples are pruned, the others as well or not at all."""
    monkeypatch.setattr(branching, "_MOST_LEFT", most_left)
    monkeypatch.setattr(branching, "_FIRST_MIXED", 2)
    model = chain(*CHAINS[kind])
    features = CHAINS[kind][0]
    limits = [{}]
    if features > 1:
        limits.append({"mask": np.arange(features) > 0})
        limits.append({"weights": 0.5 + np.arange(features)})
    proved = []
    for seed, limit in enumerate(limits):
        rng = randomise(model, seed)
        x, _ = samples(model, rng, count=3 * len(RADII))
        x[0], x[1] = 0.0, 1.0  # features without room
        if limited:
            limit = {**limit, "input_range": (0.0, 1.0)}
        proved.append(compare_with_full_scan(model, x, 3 * RADII, **limit))
    assert np.any(proved) and not np.all(proved)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.eager
@pytest.mark.parametrize("limited", [False, True])
def test_largest_margin_of_awkward_networks(limited):
    limits = {"input_range": (0.0, 1.0)} if limited else {}
    model = chain(5, (8, 6), 3, "relu")
    rng = randomise(model, 0)
    x, _ = samples(model, rng, count=len(RADII))
    first, second, last = model.layers
    # Blocks of two samples.
    compare_with_full_scan(model, x, RADII, memory_budget=4000, **limits)
    # All vertices alike, and then two classes too.
    first.kernel.assign(tf.repeat(first.kernel[:1], 5, axis=0))
    compare_with_full_scan(model, x, RADII, **limits)
    last.kernel.assign(tf.gather(last.kernel, [0, 1, 1], axis=1))
    last.bias.assign([0.0, 0.1, 0.1])
    compare_with_full_scan(model, x, RADII, **limits)
    second.bias.assign([-9.0] * 6)  # dead
    compare_with_full_scan(model, x, RADII, **limits)
    for weight in model.weights:
        weight.assign(tf.zeros_like(weight))
    assert not compare_with_full_scan(model, x, RADII, **limits).any()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.eager
def test_bad_samples_leave_the_largest_margin_of_others_alone():
    model = chain(5, (8, 6), 3, "relu")
    rng = randomise(model, 0)
    x, labels = samples(model, rng, count=12)
    problem = compiled_bounds(model, keras_rub.PerturbationSet(1)).problem
    rho = np.full(12, 0.1, "float32")

    def settle(x, rho):
        return decision.settle(
            problem,
            methods.METHODS["rub"],
            tf.constant(x),
            tf.constant(labels, tf.int32),
            tf.constant(rho),
        )

    good = settle(x, rho)
    x[0], x[10, 2], rho[3] = np.nan, np.nan, np.inf
    found = settle(x, rho)
    others = np.delete(np.arange(12), [0, 3, 10])
    assert np.asarray(good.proved)[others].any()
    for before, after in zip(good, found, strict=True):
        np.testing.assert_allclose(
            np.asarray(before)[others], np.asarray(after)[others], rtol=1e-5
        )
    assert not np.asarray(found.proved)[[0, 3, 10]].any()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.eager
def test_few_vertices_are_evaluated(monkeypatch):
    rows = []
    margins = Relaxation.margins

    def count(self, start, copies, *args):
        rows.append(len(self.constant) * int(copies))
        return margins(self, start, copies, *args)

    monkeypatch.setattr(Relaxation, "margins", count)
    model = chain(40, (16, 16), 3, "relu")
    rng = randomise(model, 0)
    x, _ = samples(model, rng, count=16)
    compare_with_full_scan(model, x, np.full(16, 0.05))
    assert max(rows) == 16 * 80  # the full scan
    rows.remove(16 * 80)
    assert sum(rows) < 16 * 20


def test_result_of_a_single_radius(rng):
    model = network("mlp")
    randomise(model, 5)
    x, y = samples(model, rng, count=30)
    wrong = y.copy()
    wrong[:10] = (y[:10] + 1) % 3
    result = keras_rub.certify(model, x, wrong, rho=0.01)
    assert result.margins.shape == (30, 3)
    assert not result.certified[:10].any()
    assert result.clean_accuracy == pytest.approx(2 / 3)
    np.testing.assert_array_equal(result.predicted, y)
    np.testing.assert_array_equal(
        result.margins[np.arange(30), wrong], np.zeros(30)
    )
    assert len(result) == 30
    assert "certified accuracy" in repr(result) and "rho=0.01" in repr(result)
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["certified"] == result.certified.tolist()
    own = keras_rub.certify(model, x, rho=0.01)
    np.testing.assert_array_equal(own.labels, y)
    assert own.clean_accuracy == 1.0


def test_radii_as_a_list_and_one_a_sample(rng):
    model = network("mlp")
    randomise(model, 5)
    x, y = samples(model, rng, count=12)
    table = keras_rub.certify(model, x, y, rho=[0.1, 0.4])
    assert table.radii == [0.1, 0.4] and len(table) == 2
    assert "0.4" in repr(table) and "certified" in repr(table)
    each = np.where(np.arange(12) % 2, 0.1, 0.4)
    mixed = keras_rub.certify(model, x, y, rho=each)
    for i in range(12):
        np.testing.assert_allclose(
            mixed.margins[i], table[i % 2 == 0].margins[i], atol=1e-5
        )


@pytest.mark.medium
def test_batches_and_datasets_change_nothing(rng):
    model = network("cnn")
    randomise(model, 2)
    x, y = samples(model, rng, count=11)
    whole = keras_rub.certify(model, x, y, rho=0.3, batch_size=64)
    for settings in ({"batch_size": 1}, {"memory_budget": 2**17}):
        parts = keras_rub.certify(model, x, y, rho=0.3, **settings)
        np.testing.assert_allclose(parts.margins, whole.margins, atol=2e-5)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    streamed = keras_rub.certify(model, data, rho=0.3)
    np.testing.assert_allclose(streamed.margins, whole.margins, atol=2e-5)
    unlabelled = keras_rub.certify(model, data.map(lambda x, y: x), rho=0.3)
    np.testing.assert_array_equal(unlabelled.certified, whole.certified)


def test_ties_and_nan_are_never_certified():
    model = network("mlp")
    x = np.full((2, 5), 0.5, "float32")
    for method in METHODS:
        # A constant network: every margin is exactly 0.
        for weight in model.weights:
            weight.assign(tf.zeros_like(weight))
        result = keras_rub.certify(model, x, [0, 0], rho=0.0, method=method)
        assert not result.certified.any()
        randomise(model, 0)
        model.layers[0].kernel.assign(
            tf.fill(model.layers[0].kernel.shape, np.nan)
        )
        result = keras_rub.certify(model, x, [0, 0], rho=0.1, method=method)
        assert not result.certified.any()


@pytest.mark.medium
@pytest.mark.parametrize("norm", [1, 2, "inf"])
@pytest.mark.parametrize("kind", ["mlp", "smooth", "cnn", "residual"])
def test_order_of_intervals_and_lines(kind, norm):
    """Where one bound must be below another, whatever the network.

    CROWN-IBP takes the smaller of its own margin and that of intervals, and
    alpha-CROWN begins with the lines of CROWN. CROWN's slopes of 0 or 1 jump
    with the range, so its margin may be above that of CROWN-IBP or of
    intervals, though its ranges never are (see test_linear.py); `auto` takes
    the smallest of all.
    """
    model = network(kind)
    for seed, rho in ((0, 0.05), (1, 0.3), (2, 1.0), (3, 0.0)):
        x, y = samples(model, randomise(model, seed, 1.5), count=6)
        found = {
            method: keras_rub.certify(
                model, x, y, rho=rho, norm=norm, method=method, verbose=0
            )
            for method in ("ibp", "crown-ibp", "crown", "alpha-crown", "auto")
        }
        margins = {name: result.margins for name, result in found.items()}
        slack = 1e-5 * (1.0 + np.abs(margins["ibp"]).max())
        assert np.all(margins["crown-ibp"] <= margins["ibp"] + slack)
        assert np.all(margins["alpha-crown"] <= margins["crown"] + slack)
        if norm == 1:
            continue
        for name, result in found.items():
            assert np.all(margins["auto"] <= margins[name] + slack), name
            assert np.all(found["auto"].certified >= result.certified), name
        assert rho or np.allclose(margins["ibp"], margins["auto"], atol=1e-4)


@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_graphs_and_eager_functions_agree(norm):
    model = network("mlp")
    x, y = samples(model, randomise(model, 5, 1.5))

    def margins():
        return [
            keras_rub.certify(
                model, x, y, rho=0.4, norm=norm, method=method, verbose=0
            ).margins
            for method in keras_rub.bounds.methods.names(norm)
        ]

    traced = margins()
    tf.config.run_functions_eagerly(True)
    np.testing.assert_allclose(margins(), traced, rtol=1e-5, atol=1e-5)


@pytest.mark.eager
def test_allowance_covers_float32(rng):
    for kind in ("mlp", "cnn", "residual"):
        model = network(kind)
        randomise(model, 7, scale=3.0)
        x, y = samples(model, rng, count=40, low=-5.0, high=5.0)
        single, double = (
            keras_rub.certify(model, x, y, rho=0.7, method="rub", dtype=dtype)
            for dtype in ("float32", "float64")
        )
        error = np.abs(single.margins - double.margins)
        bounds = compiled_bounds(model, keras_rub.PerturbationSet(1))
        radii = np.full(40, 0.7, "float32")
        allowance = bounds.allowance(x, y.astype("int32"), radii).numpy()
        assert np.all(error.max(axis=1) <= allowance.max(axis=1))
        assert np.all(double.certified >= single.certified)


@pytest.mark.eager
@pytest.mark.parametrize("norm", [1, 2, "inf"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_certified_radius(kind, norm, rng):
    model = network(kind)
    randomise(model, 11)
    x, y = samples(model, rng, count=12)
    y[0] = (y[0] + 1) % 3
    method = "rub" if norm == 1 else "crown"
    settings = {"norm": norm, "method": method, "verbose": 0}
    radius = keras_rub.certified_radius(
        model, x, y, tolerance=0.01, max_radius=4.0, **settings
    )
    assert radius[0] == 0.0 and np.all(radius[1:] > 0.0)
    inside = keras_rub.certify(model, x, y, rho=radius, **settings)
    assert inside.certified[1:].all()
    open_ = (radius < 4.0) & (radius > 0.0)
    assert open_.any()
    outside = keras_rub.certify(model, x, y, rho=radius * 1.02, **settings)
    assert not outside.certified[open_].any()


LIMITS = {
    "plain": {},
    "range": {"input_range": (0.0, 1.0)},
    "mask": {"mask": [1, 0, 1, 1, 0]},
}


@pytest.mark.parametrize(
    ("norm", "method", "limits"),
    [
        *(
            (norm, method, "plain")
            for norm in (1, 2, "inf")
            for method in keras_rub.bounds.methods.names(norm)
        ),
        (1, "rub", "range"),
        (1, "auto", "range"),
        (1, "auto", "mask"),
        ("inf", "auto", "range"),
    ],
)
def test_certify_proves_the_radius(norm, method, limits, rng):
    model = network("mlp")
    randomise(model, 11)
    x, y = samples(model, rng, count=10)
    y[0] = (y[0] + 1) % 3
    settings = {"norm": norm, "verbose": 0, **LIMITS[limits]}
    radius = keras_rub.certified_radius(
        model, x, y, method=method, max_radius=2.5, **settings
    )
    assert radius[0] == 0.0 and np.all(radius[1:] > 0.0)
    assert np.all(radius <= 2.5)
    settings.update(method=method, decide_only=True)
    inside = keras_rub.certify(model, x, y, rho=radius, **settings)
    np.testing.assert_array_equal(inside.certified, radius > 0.0)
    outside = keras_rub.certify(model, x, y, rho=radius * 1.0102, **settings)
    assert not outside.certified[radius < 2.5].any()


@pytest.mark.parametrize("kind", ["mlp", "smooth"])
def test_dear_stages_only_add_to_the_radius(kind, rng):
    model = network(kind)
    randomise(model, 12)
    x, y = samples(model, rng, count=12)
    radius = {
        method: keras_rub.certified_radius(model, x, y, method=method)
        for method in ("rub", "alpha-rub", "auto")
    }
    assert np.all(radius["alpha-rub"] >= radius["rub"])
    assert np.all(radius["auto"] >= radius["rub"])
    assert np.any(radius["auto"] > radius["rub"])


@pytest.mark.eager
@pytest.mark.parametrize("method", ["rub", "crown", "auto"])
def test_radius_without_a_limit_is_the_largest(method, rng):
    model = network("mlp")
    randomise(model, 13)
    x, y = samples(model, rng, count=4)
    y[0] = (y[0] + 1) % 3
    radius = keras_rub.certified_radius(
        model, x, y, method=method, mask=np.zeros(5, bool), max_radius=70.0
    )
    np.testing.assert_array_equal(radius, [0.0, 70.0, 70.0, 70.0])


@pytest.mark.eager
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("factor", [0.0, 1e-6, 0.5, 0.99, 1.01, 3.0, 1e9])
def test_no_guess_changes_the_radius(tolerance, factor):
    """The answer is that of bisection; a good guess takes two tests."""
    true = np.array([3e-10, 2e-4, 0.7, 1.0, 5.3, 40.0, 200.0])
    usable = tf.ones(7, tf.bool)
    tests = []

    def search(guess, proved=None):
        tests.clear()

        def prove(rows, rho):
            tests.append(rho.numpy())
            return rho <= tf.gather(true, rows)

        return radii.largest_radius(
            prove, usable, guess, tolerance, 100.0, proved=proved
        ).numpy()

    expected = search(true)
    assert len(tests) <= 2
    assert expected[0] == 0.0 and expected[-1] == 100.0
    assert np.all(expected <= true)
    assert np.all(expected[1:-1] >= true[1:-1] * (1.0 - tolerance))
    np.testing.assert_array_equal(search(true * factor), expected)
    np.testing.assert_array_equal(search(true * factor, expected), expected)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_zero_of_a_rising_function(power):
    true = np.array([1e-4, 0.3, 1.0, 90.0])
    found = radii.zero_of(
        lambda rho: (rho / true) ** power - 1.0,
        tf.constant([1.0, 1.0, 1.0, 20.0], tf.float64),
        -tf.ones(4, tf.float64),
        tf.constant(1e-3, tf.float64),
        tf.constant(50.0, tf.float64),
    )
    np.testing.assert_allclose(found[1:], [0.3, 1.0, 50.0], rtol=0.01)


@pytest.mark.eager
def test_radius_of_a_linear_network_is_exact():
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    kernel = np.array([[0.0, 1.0], [0.0, -2.0], [0.0, 0.5]])
    model.set_weights([kernel, np.array([0.0, -3.0])])
    x = np.zeros((1, 3), "float32")
    for norm, dual in ((1, 2.0), (2, np.sqrt(5.25)), ("inf", 3.5)):
        radius = keras_rub.certified_radius(
            model, x, [0], norm=norm, tolerance=1e-3
        )
        np.testing.assert_allclose(radius, 3.0 / dual, rtol=2e-3)


@pytest.mark.medium
def test_trained_networks_end_to_end():
    """A robust CNN and a plain residual net on real digits."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.images[order, ..., None] / 16.0).astype("float32")
    y = digits.target[order]
    base = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    model = keras_rub.RUBModel(base, rho=0.3, input_range=(0.0, 1.0))
    model.compile(
        keras.optimizers.Adam(5e-3), loss="sparse_categorical_crossentropy"
    )
    ramp = keras_rub.callbacks.RhoSchedule(epochs=4)
    model.fit(
        x[:1200],
        y[:1200],
        epochs=6,
        batch_size=64,
        verbose=0,
        callbacks=[ramp],
    )
    result = keras_rub.certify(
        model, x[-40:], y[-40:], rho=0.3, input_range=(0.0, 1.0)
    )
    assert result.clean_accuracy > 0.7
    assert 0.4 < result.certified_accuracy <= result.clean_accuracy
    rng = np.random.default_rng(0)
    try_to_break(
        model,
        x[-10:],
        y[-10:],
        keras_rub.certify(model, x[-10:], y[-10:], rho=0.3, method="rub"),
        0.3,
        1,
        rng,
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"rho": -1.0}, ValueError, "`rho` must be"),
        ({"rho": []}, ValueError, "at least one radius"),
        ({"rho": [0.1, np.nan]}, ValueError, "`rho` must be"),
        ({"rho": np.ones(7)}, ValueError, "one radius a sample"),
        ({"rho": 1.0, "norm": 2, "method": "rub"}, ValueError, "t do norm 2"),
        ({"rho": 1.0, "norm": 3}, ValueError, "`norm` must be"),
        ({"rho": 1.0, "method": "lp"}, ValueError, "`method` must be one of"),
        ({"rho": 1.0, "y": [0, 1]}, ValueError, "same length"),
        ({"rho": 1.0, "y": [0, 1, 5]}, ValueError, "from 0 to 2"),
        ({"rho": 1.0, "input_range": (0.6, 1.0)}, ValueError, "leaves"),
        ({"rho": 1.0, "mask": [1, 0]}, ValueError, "`mask` must broadcast"),
        ({"rho": 1.0, "memory_budget": 10}, ValueError, "too small for one"),
        ({"rho": 1.0, "dtype": "float16"}, ValueError, "`dtype` must be"),
        ({"rho": 1.0, "batch_size": 0}, ValueError, "`batch_size` must be"),
        ({"rho": 1.0, "verbose": 7}, ValueError, "`verbose` must be"),
        ({"rho": 1.0, "x": np.ones((3, 4))}, ValueError, "`x` must have the"),
        ({"rho": 1.0, "x": np.full((3, 5), np.nan)}, ValueError, "NaN"),
        ({"rho": 1.0, "x": np.ones((0, 5))}, ValueError, "at least one sample"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    model = network("mlp")
    randomise(model, 0)
    x = kwargs.pop("x", np.full((3, 5), 0.5, "float32"))
    y = kwargs.pop("y", None)
    with pytest.raises(error, match=message):
        keras_rub.certify(model, x, y, **kwargs)


def test_models_that_cannot_be_certified():
    x = np.zeros((2, 4), "float32")
    softmax = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(3, activation="softmax", name="middle"),
            layers.Dense(2),
        ]
    )
    with pytest.raises(
        keras_rub.UnsupportedLayerError, match="'middle'.*softmax"
    ):
        keras_rub.certify(softmax, x, rho=0.1)
    with pytest.raises(ValueError, match="not built"):
        keras_rub.certify(keras.Sequential([layers.Dense(2)]), x, rho=0.1)
    with pytest.raises(TypeError, match="keras.Model"):
        keras_rub.certify(lambda x: x, x, rho=0.1)
    with pytest.raises(ValueError, match="`tolerance` must be"):
        keras_rub.certified_radius(network("mlp"), x, tolerance=0.0)


def test_progress_bar_can_be_silenced(capsys, rng):
    model = network("mlp")
    randomise(model, 0)
    x, y = samples(model, rng, count=8)
    keras_rub.certify(model, x, y, rho=0.1, verbose=0)
    assert capsys.readouterr().out == ""
    keras_rub.certify(model, x, y, rho=0.1, verbose=1, batch_size=4)
    assert "8/8" in capsys.readouterr().out


@pytest.mark.medium
def test_many_networks_are_no_retracing(caplog):
    """TensorFlow warns after five tracings of what it takes to be one."""
    tf.get_logger().addHandler(caplog.handler)
    try:
        for _ in range(6):
            model = keras_rub.models.mlp((3,), 2, hidden=(4,))
            keras_rub.certify(model, np.ones((1, 3)), rho=0.5)
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert "retracing" not in caplog.text
