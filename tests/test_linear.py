"""Linear relaxations: against a plain CROWN, in chunks, in their order."""

import dataclasses
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub
from keras_rub.bounds import local
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.bounds.first_layer import first_layer
from keras_rub.bounds.methods import METHODS
from keras_rub.bounds.problem import Problem
from tests import crown_reference
from tests.test_certify import network, randomise, samples


@functools.cache
def wide(kind):
    """Networks with a hidden layer of more than 4096 behind the first."""
    if kind == "dense":
        body = [
            layers.Input((6,)),
            layers.Dense(24, activation="relu"),
            layers.Dense(4200, activation="relu"),
        ]
    else:
        body = [
            layers.Input((12, 12, 1)),
            layers.Conv2D(3, 3, strides=1, padding="same", activation="relu"),
            layers.Conv2D(30, 3, padding="same", activation="relu"),
        ]
    if kind == "pooled":
        body += [layers.MaxPooling2D(), layers.AveragePooling2D(2)]
    if kind != "dense":
        body.append(layers.Flatten())
    body += [layers.Dense(8, activation="relu"), layers.Dense(3)]
    return keras.Sequential(body)


@pytest.mark.eager
@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "norm", "rho"),
    [
        ("dense", "inf", 0.06),
        pytest.param("dense", 2, 0.1, marks=pytest.mark.slow),
        pytest.param("dense", 1, 0.15, marks=pytest.mark.slow),
        ("conv", "inf", 0.02),
        pytest.param("conv", 2, 0.15, marks=pytest.mark.slow),
        pytest.param("conv", 1, 0.6, marks=pytest.mark.slow),
        pytest.param("pooled", "inf", 0.02, marks=pytest.mark.slow),
        pytest.param("pooled", 2, 0.15, marks=pytest.mark.slow),
        pytest.param("pooled", 1, 0.6, marks=pytest.mark.slow),
    ],
)
def test_crown_is_the_plain_one(kind, norm, rho):
    model = wide(kind)
    rng = randomise(model, 5)
    x, y = samples(model, rng, count=6)
    limits = {} if norm == 2 else {"input_range": (0.0, 1.0)}
    radii = np.geomspace(0.1, 30.0, len(x)) * rho
    found = keras_rub.certify(
        model, x, y, rho=radii, norm=norm, method="crown", verbose=0, **limits
    )
    assert found.interval_layers == ()
    expected = np.stack(
        [
            crown_reference.margins(model, x[i], y[i], radii[i], norm, **limits)
            for i in range(len(x))
        ]
    )
    others = np.arange(3) != y[:, None]
    decided = np.all((expected < 0) | ~others, axis=1)
    assert 0 < decided.sum() < len(x)  # both answers occur
    np.testing.assert_array_equal(found.certified, decided)
    np.testing.assert_allclose(found.margins, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.eager
@pytest.mark.parametrize("method", ["crown", "coap"])
def test_memory_budget_changes_no_margin(method):
    # One row at a time, and all rows of all samples at once.
    model = network("mlp" if method == "coap" else "smooth")
    x, y = samples(model, randomise(model, 8), count=5)
    settings = {"rho": 0.1, "norm": "inf", "method": method, "verbose": 0}
    whole, parts = (
        keras_rub.certify(model, x, y, memory_budget=budget, **settings)
        for budget in (2**26, 1)
    )
    assert parts.interval_layers == ()
    np.testing.assert_array_equal(parts.certified, whole.certified)
    np.testing.assert_allclose(
        parts.margins, whole.margins, rtol=1e-4, atol=1e-5
    )


def largest_tensor(function):
    """Bytes of the largest tensor of a graph, for one sample."""
    graph = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    nodes = [*graph.node]
    for part in graph.library.function:
        nodes += part.node_def
    sizes = [
        4 * math.prod(max(int(axis.size), 1) for axis in shape.dim)
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
        if not shape.unknown_rank
    ]
    assert len(sizes) > 100
    return max(sizes)


@pytest.mark.medium
@pytest.mark.parametrize("method", ["crown", "coap"])
def test_no_tensor_is_larger_than_the_budget(method):
    # A first layer of 3136 neurons, whose matrix would take 10 MB.
    model = keras_rub.models.small_cnn((28, 28, 1), 10)
    weights = 4 * max(math.prod(weight.shape) for weight in model.weights)
    budget = 2**20
    assert weights < budget
    bounds = compiled_bounds(
        model, keras_rub.PerturbationSet("inf"), memory_budget=budget
    )
    for function in (bounds.margins(METHODS[method]), bounds.allowance):
        assert weights <= largest_tensor(function) <= budget


@pytest.mark.eager
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_allowance_of_a_convolution_is_that_of_its_matrix(norm):
    model = network("cnn")
    rng = randomise(model, 3)
    x, y = samples(model, rng, count=3)
    mask = np.arange(x[0].size).reshape(x[0].shape) % 3 > 0
    weights = rng.uniform(0.5, 2.0, x[0].shape)
    attacker = keras_rub.PerturbationSet(norm, mask=mask, weights=weights)
    problem = Problem.of(model, attacker)
    x, y = tf.constant(x), tf.constant(y, tf.int32)
    rho = tf.constant([0.0, 0.1, 3.0])
    relaxation = problem.relaxation(x, y)
    start = first_layer(relaxation)
    assert start.convolves
    moves = attacker.support(tf.transpose(start.response), x.shape[1:])
    reach = tf.reshape(rho[:, None] * moves, tf.shape(start.clean))
    expected = np.finfo("float32").eps * relaxation.rounding(
        {start.value: reach}
    )
    np.testing.assert_allclose(
        problem.allowance(x, y, rho), expected, rtol=1e-5
    )


@pytest.mark.eager
def test_an_option_makes_ranges_intervals_and_the_result_says_so():
    model = network("mlp")  # 7 and 6 neurons
    x, y = samples(model, randomise(model, 2), count=4)
    settings = {"rho": 0.3, "norm": "inf", "verbose": 0}

    def certify(method, **more):
        return keras_rub.certify(model, x, y, method=method, **settings, **more)

    second = model.layers[1].name
    exact = certify("crown")
    cheap = certify("crown", widest=5)
    assert exact.interval_layers == () and "interval" not in repr(exact)
    assert cheap.interval_layers == (second,) and second in repr(cheap)
    assert cheap.to_dict()["interval_layers"] == [second]
    assert not np.allclose(cheap.margins, exact.margins)
    np.testing.assert_array_equal(
        certify("crown", widest=6).margins, exact.margins
    )
    both = np.minimum(cheap.margins, certify("ibp").margins)
    linear = certify("crown-ibp")
    assert linear.interval_layers == (second,)
    np.testing.assert_allclose(linear.margins, both, atol=1e-5)
    assert certify("auto").interval_layers == ()
    with pytest.raises(ValueError, match="Received: `widest=-1`"):
        certify("crown", widest=-1)


@pytest.mark.parametrize("kind", ["mlp", "smooth", "cnn", "strided"])
def test_ranges_of_crown_lie_within_intervals(kind):
    """In every neuron, whatever the lines are; on windows too."""
    model = network(kind)
    x, y = samples(model, randomise(model, 1, 1.5), count=3)
    for norm in (1, 2, "inf"):
        problem = Problem.of(model, keras_rub.PerturbationSet(norm))
        data = tf.constant(x), tf.constant(0.3)
        wide, tight = problem.intervals(*data), problem.linear(*data, "crown")
        for source in (
            operation.inputs[0]
            for operation in problem.program.operations
            if operation.output in tight.lines
        ):
            outer, inner = wide.values[source], tight.intervals[source]
            slack = 1e-5 * (1.0 + np.abs(outer.high).max())
            assert np.all(inner.low >= outer.low - slack)
            assert np.all(inner.high <= outer.high + slack)
            assert np.all(inner.low <= inner.high + slack)


@pytest.mark.eager
def test_all_are_exact_where_no_neuron_is_open():
    """Linear over the ball: nothing is relaxed, so nothing is lost.

    Intervals alone forget what two layers have in common, and may be looser.
    """
    model = network("mlp")
    x, y = samples(model, randomise(model, 4), count=4)
    for layer, height in zip(model.layers, (30.0, 300.0), strict=False):
        layer.bias.assign(layer.bias + height)  # always on
    y = model.predict(x, verbose=0).argmax(1)
    with tf.GradientTape() as tape:
        points = tf.constant(x)
        tape.watch(points)
        logits = model(points)
    rows = tape.batch_jacobian(logits, points).numpy()
    rows -= rows[np.arange(len(x)), y][:, None]
    exact = logits.numpy() - logits.numpy()[np.arange(len(x)), y][:, None]
    exact += 0.1 * np.abs(rows).sum(axis=-1)
    for method in ("ibp", "crown-ibp", "crown", "alpha-crown"):
        found = keras_rub.certify(
            model, x, y, rho=0.1, norm="inf", method=method, verbose=0
        ).margins
        if method == "ibp":
            assert np.all(found >= exact - 2e-3)
        else:
            np.testing.assert_allclose(found, exact, atol=2e-3)


@pytest.mark.eager
def test_one_hidden_layer_needs_no_ranges():
    """There intervals and substitution know the same of the first layer."""
    model = keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(9, activation="relu"),
            layers.Dense(3),
        ]
    )
    x, y = samples(model, randomise(model, 1, 2.0), count=5)
    for norm in (1, 2, "inf"):
        found = [
            keras_rub.certify(
                model, x, y, rho=0.4, norm=norm, method=method, verbose=0
            ).margins
            for method in ("ibp", "crown-ibp", "crown")
        ]
        assert np.all(found[1] <= found[0] + 1e-5)
        assert np.all(found[1] <= found[2] + 1e-5)
        np.testing.assert_allclose(
            found[1], np.minimum(found[0], found[2]), atol=1e-5
        )


@pytest.mark.eager
@pytest.mark.parametrize("decide_only", [False, True])
def test_slopes_are_optimised_where_margins_are_open(decide_only):
    model = network("mlp")
    x, y = samples(model, randomise(model, 3, 1.5), count=16)
    radius = keras_rub.certified_radius(model, x, y, norm="inf", method="crown")
    settings = {"norm": "inf", "rho": radius * 1.15, "verbose": 0}
    plain = keras_rub.certify(model, x, y, method="crown", **settings)
    found = keras_rub.certify(
        model, x, y, method="alpha-crown", decide_only=decide_only, **settings
    )
    assert not plain.certified.any()
    assert found.certified.sum() >= 8
    assert set(found.decided_by) <= {"", "alpha-crown"}


@pytest.mark.medium
def test_radius_of_a_search_is_certified():
    model = network("mlp")
    x, y = samples(model, randomise(model, 3, 1.5), count=3)
    settings = {"norm": "inf", "method": "auto"}
    radius = keras_rub.certified_radius(model, x, y, **settings)
    crown = keras_rub.certified_radius(model, x, y, norm="inf", method="crown")
    assert np.all(radius >= crown) and np.any(radius > 1.05 * crown)
    at = keras_rub.certify(model, x, y, rho=radius, **settings)
    beyond = keras_rub.certify(model, x, y, rho=radius * 1.02, **settings)
    assert at.certified.all() and not beyond.certified.any()


def test_repeated_samples_share_their_ranges():
    model = network("mlp")
    x, y = samples(model, randomise(model, 3, 1.5), count=3)
    attacker = keras_rub.PerturbationSet("inf")
    bounds = compiled_bounds(model, attacker)
    search = bounds.search(keras_rub.bounds.methods.METHODS["alpha-crown"])
    rho = np.full(3, 0.8, "float32")
    columns = np.zeros(3, "int32")
    alone = [
        search(*(part[i : i + 1] for part in (x, y, rho, columns)))
        for i in range(3)
    ]
    order = [2, 0, 2, 1, 0]
    again = search(x[order], y[order], rho[order], columns[[0] * 5])
    np.testing.assert_allclose(
        again, np.concatenate(alone)[order], rtol=1e-5, atol=1e-6
    )


# Windows of convolutions -----------------------------------------------------


WINDOWED = {
    "strides": (
        (12, 12, 2),
        [
            layers.Conv2D(3, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(4, 2, strides=2, padding="same", activation="tanh"),
        ],
    ),
    "scaled, valid, three deep": (
        (20, 9, 1),
        [
            layers.Conv2D(2, (3, 1)),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(2, 2, use_bias=False),
            layers.Conv2D(3, (2, 3), padding="same", activation="gelu"),
            layers.Conv2D(2, 2, strides=(2, 1), activation="leaky_relu"),
        ],
    ),
    "one axis": (
        (40, 2),
        [
            layers.Rescaling(2.0, -1.0),
            layers.Conv1D(3, 4, strides=2, padding="same", activation="relu"),
            layers.Conv1D(4, 3, padding="same", activation="relu"),
        ],
    ),
    "three axes": (
        (7, 6, 6, 1),
        [
            layers.Conv3D(2, 2, padding="same", activation="relu"),
            layers.Conv3D(2, 2, activation="relu"),
        ],
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_whole_rows(name, monkeypatch):
    """Ranges on windows are those of rows over whole values."""
    shape, stack = WINDOWED[name]
    model = keras.Sequential(
        [layers.Input(shape), *stack, layers.Flatten(), layers.Dense(3)]
    )
    rng = randomise(model, 3)
    x, _ = samples(model, rng, count=3)
    monkeypatch.setattr(local, "_WORTH", 1.0)
    size = int(np.prod(shape))
    attackers = [
        {"norm": "inf"},
        {"norm": 2, "weights": rng.uniform(0.5, 2.0, shape)},
        {"norm": 1, "input_range": (0.0, 1.0)},
        {"norm": "inf", "input_range": (0.0, 1.0)}
        | {"mask": (np.arange(size) % 3 > 0).reshape(shape)},
    ]
    # The way is the same for all attackers but for its end.
    for settings in attackers if name == "strides" else attackers[3:]:
        problem = Problem.of(model, keras_rub.PerturbationSet(**settings))
        data = tf.constant(x), tf.constant([0.0, 0.05, 0.4])
        found = problem.linear(*data, "crown")
        tried = [
            local.Windows.of(problem.program, index, found.shapes)
            for index in found.shapes
        ]
        assert sum(windows is not None for windows in tried) >= 3
        some = dataclasses.replace(problem, memory_budget=2**19)
        parts = some.linear(*data, "crown")
        with monkeypatch.context() as patch:
            patch.setattr(local.Windows, "of", lambda *_: None)
            whole = problem.linear(*data, "crown")
        for operation in problem.program.operations:
            if operation.output not in found.lines:
                continue
            low, high = whole.intervals[operation.inputs[0]]
            # A ReLU that is on or off may keep a wider range.
            free = (low < 0) & (high > 0)
            for other in (found, parts):
                for end, expected in zip(
                    other.intervals[operation.inputs[0]],
                    (low, high),
                    strict=True,
                ):
                    np.testing.assert_allclose(
                        end[free], expected[free], rtol=1e-4, atol=1e-4
                    )


def test_windows_only_where_there_are_some():
    for kind in ("mlp", "residual"):
        problem = Problem.of(network(kind), keras_rub.PerturbationSet("inf"))
        output = problem.program.output
        assert local.Windows.of(problem.program, output, {}) is None
