"""Categories: columns that switch, at a price."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize

import keras_rub
from keras_rub import Category, Ordinal, PerturbationSet
from keras_rub.bounds import methods
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.categories import switched_rows

TABLE = [[0, 0.3, 2.0], [0.4, 0, None], [0.2, 0.9, 0]]

# Two numbers, a category with a table of prices, another with one price, and
# a grade.
GROUPS = [Category([2, 3, 4], TABLE), Category([5, 6], 0.5), Ordinal(7, 2, 0.3)]
LOW = [-1.0, -1.0, 0, 0, 0, 0, 0, 0.0]
HIGH = [1.0, 1.0, 1, 1, 1, 1, 1, 8.0]


def attacker(**parts):
    return PerturbationSet(
        **{"categories": GROUPS, "input_range": (LOW, HIGH), **parts}
    )


def row(numbers, first, second, grade):
    return [*numbers, *np.eye(3)[first], *np.eye(2)[second], grade]


X = np.array(
    [row([0.0, 0.5], 0, 1, 4.0), row([-0.3, 1.0], 2, 0, 0.0)], "float32"
)


def test_round_trips():
    found = attacker(mask=[0, 1, 1, 1, 1, 1, 1, 1])
    config = json.loads(json.dumps(found.get_config()))
    assert PerturbationSet.from_config(config) == found
    assert PerturbationSet.from_config(config).key == found.key
    assert found.key != attacker().key
    assert found.replace(mask=None) == attacker()
    assert hash(GROUPS[0]) == hash(Category((2, 3, 4), TABLE))
    assert str(attacker()).endswith("2 categories, 1 ordinal")
    assert "categories" not in PerturbationSet().get_config()
    assert attacker().numeric((8,)).mask.tolist() == [True] * 2 + [False] * 6


def test_prices():
    np.testing.assert_array_equal(
        GROUPS[0].prices,
        [[np.inf, 0.3, 2.0], [0.4, np.inf, np.inf], [0.2, 0.9, np.inf]],
    )


@pytest.mark.parametrize(
    ("point", "rho", "inside"),
    [
        (row([0.0, 0.5], 0, 1, 4.0), 0.0, True),
        (row([0.0, 0.5], 1, 1, 4.0), 0.3, True),
        (row([0.0, 0.5], 1, 1, 4.0), 0.2999, False),
        (row([0.0, 0.5], 2, 1, 4.0), 1.9, False),
        (row([0.1, 0.5], 1, 0, 4.0), 0.9, True),
        (row([0.2, 0.5], 1, 0, 4.0), 0.9, False),
        (row([0.0, 0.5], 0, 1, 8.0), 0.6, True),
        (row([0.0, 0.5], 0, 1, 6.0), 0.2999, False),
        (row([0.0, 0.5], 0, 1, 5.0), 9.0, False),
        (row([0.0, 0.5], 0, 1, 10.0), 9.0, False),
        ([0.0, 0.5, 0.5, 0.5, 0, 0, 1, 4.0], 9.0, False),
        ([0.0, 0.5, 0, 0, 0, 0, 1, 4.0], 9.0, False),
    ],
)
def test_contains(point, rho, inside):
    found = attacker().contains(X[:1], np.array([point]), rho)
    assert found.tolist() == [inside]


MISTAKES = {
    "must not share columns": lambda: attacker(
        categories=[Category([1, 2]), Category([2, 3])]
    ),
    "two or more different": lambda: Category([3]),
    "counted from": lambda: Category(["red", "blue"]),
    "`price` must be finite": lambda: Category([0, 1], price=0.0),
    "a table of 2 rows": lambda: Category([0, 1], price=[[0, 1]]),
    "above 0 between": lambda: Category([0, 1], price=[[0, -1], [1, 0]]),
    "one switch at least": lambda: Category(
        [0, 1], price=[[0, None], [None, 0]]
    ),
    "`step` of an Ordinal": lambda: Ordinal(0, step=0),
    "`price` of an Ordinal": lambda: Ordinal(0, price=np.inf),
    "keras_rub.Category and": lambda: attacker(categories=[[1, 2]]),
    "need norm 1": lambda: attacker(norm=2),
    "need norm 1,": lambda: attacker().with_norm("inf"),
    "`mask` must be true": lambda: attacker(
        mask=[1, 1, 0, 1, 1, 1, 1, 1]
    ).check_shape((8,)),
    "`weights` must be 1": lambda: attacker(
        weights=[1, 1, 1, 1, 1, 1, 1, 2]
    ).check_shape((8,)),
    "must hold 0 and 1": lambda: attacker(input_range=(0.5, 9.0)).check_shape(
        (8,)
    ),
    "columns below 6": lambda: attacker(input_range=None).check_shape((6,)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        MISTAKES[words]()
    assert "Received:" in str(caught.value)
    assert "\n" not in str(caught.value)


# Bounds -----------------------------------------------------------------------

METHODS = ("rub", "alpha-rub", "crown", "coap", "ibp", "alpha-crown", "exact")


def network(*widths, classes=3):
    return keras.Sequential(
        [
            keras.Input((8,)),
            *(keras.layers.Dense(width, "relu") for width in widths),
            keras.layers.Dense(classes, bias_initializer="glorot_normal"),
        ]
    )


def rows(count, rng):
    return np.concatenate(
        [
            rng.uniform(-1, 1, [count, 2]),
            np.eye(3)[rng.integers(3, size=count)],
            np.eye(2)[rng.integers(2, size=count)],
            2.0 * rng.integers(0, 5, [count, 1]),
        ],
        axis=1,
    ).astype("float32")


def reached(found, x, rho, count, rng):
    """All switches of one row, each with many moves of the two numbers."""
    room = [part.numpy() for part in found.room(tf.constant(x))]
    starts, spent = switched_rows(found.categories, x, rho, room, 10**6)
    parts = []
    for start, price in zip(starts, spent, strict=True):
        # Corners, edges and the inside of what is left of the ball.
        share = rng.dirichlet([0.3, 0.3, 0.1], count)[:, :2]
        share[:4] = [[1, 0], [1, 0], [0, 1], [0, 1]]
        sign = rng.choice([-1, 1], [count, 2])
        sign[:4] = [[1, 1], [-1, 1], [1, 1], [1, -1]]
        moves = sign * share * max(rho - price, 0) * found.reach((8,))[:2]
        points = np.repeat(start[None], count, axis=0).astype("float64")
        points[:, :2] += moves
        parts.append(points)
    points = np.concatenate(parts)
    if found.input_range is not None:
        points[:, :2] = np.clip(points[:, :2], -1, 1)
    return points.astype("float32")


def check(model, found, x, y, rho, result, count, rng):
    """Raises where a point is above a bound; returns how many there were."""
    total = 0
    for number, row_ in enumerate(x):
        points = reached(found, row_, rho, count, rng)
        inside = found.contains(
            np.repeat(row_[None], len(points), 0), points, rho
        )
        assert inside.all()
        logits = model(points).numpy()
        total += len(points)
        worst = (logits - logits[:, y[number], None]).max(axis=0)
        if result.certified[number]:
            assert (logits.argmax(axis=-1) == y[number]).all()
        if result.method != "exact" and y[number] == result.predicted[number]:
            allowed = result.margins[number] + 1e-5 * np.abs(logits).max()
            assert (worst <= allowed).all()
    return total


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(3)
    return network(6, 5)


@pytest.mark.medium
def test_no_method_is_below_a_point(model):
    rng = np.random.default_rng(0)
    x = rows(8, rng)
    found = attacker(weights=[1, 0.5, 1, 1, 1, 1, 1, 1])
    y = model(x).numpy().argmax(axis=-1)
    y[0] = (y[0] + 1) % 3
    for method in METHODS:
        for rho in (0.0, 0.45, 0.9):
            result = keras_rub.certify(
                model, x, y, rho=rho, perturbations=found, method=method
            )
            check(model, found, x, y, rho, result, 20, rng)
            assert not (result.certified & result.broken).any()
            broken = result.broken
            points = result.counterexamples
            if points is None:
                continue
            assert found.contains(x[broken], points[broken], rho).all()
            after = model(points).numpy().argmax(axis=-1)
            assert (after != y)[broken].all()
            if method == "exact":
                assert not result.undecided.any()


def with_skip():
    """A network whose input is read twice: it has no single first layer."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(5, "leaky_relu")(inputs)
    hidden = keras.layers.Concatenate()([inputs, hidden])
    hidden = keras.layers.Dense(5, "relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


@pytest.mark.parametrize("kind", ["chain", "skip"])
def test_hull_is_below_no_point(model, kind):
    """The bound of a graph, before samples are split."""
    if kind == "skip":
        model = with_skip()
    rng = np.random.default_rng(1)
    for found in (attacker(), attacker(input_range=None)):
        x = rows(6, rng)
        labels = model(x).numpy().argmax(axis=-1).astype("int32")
        bounds = compiled_bounds(model, found)
        double = compiled_bounds(model, found, dtype="float64")
        for name in ("rub", "crown", "ibp"):
            margins = bounds.margins(methods.find(name))
            for rho in (0.29, 0.31, 0.6, 1.3):
                radii = np.full(6, rho, "float32")
                got = margins(x, labels, radii).numpy()
                if name == "rub":
                    data = x.astype("float64"), labels, radii.astype("float64")
                    true = double.margins(methods.find(name))(*data).numpy()
                    allowed = bounds.allowance(x, labels, radii).numpy()
                    assert (np.abs(got - true) <= allowed).all()
                for number in range(6):
                    points = reached(found, x[number], rho, 20, rng)
                    logits = model(points).numpy()
                    rivals = (labels[number] + 1 + np.arange(2)) % 3
                    worst = (
                        logits[:, rivals] - logits[:, labels[number], None]
                    ).max(axis=0)
                    assert (worst <= got[number] + 1e-5).all(), (name, rho)


def test_only_categories_are_decided_exactly(model):
    """Without free moves every row is one point: the certificate is exact."""
    rng = np.random.default_rng(2)
    x = rows(20, rng)
    found = attacker(mask=[0, 0, 1, 1, 1, 1, 1, 1])
    y = model(x).numpy().argmax(axis=-1)
    result = keras_rub.certify(
        model, x, y, rho=0.7, perturbations=found, method="rub"
    )
    assert not result.undecided.any()
    for number, row_ in enumerate(x):
        points = reached(found, row_, 0.7, 4, rng)
        same = (model(points).numpy().argmax(axis=-1) == y[number]).all()
        assert result.certified[number] == same


def test_one_hidden_layer_and_one_switch_is_tight():
    """A margin that is convex in the input: the bound is its maximum."""
    keras.utils.set_random_seed(0)
    model = network(16, classes=2)
    kernel, bias = model.layers[-1].get_weights()
    kernel[:, 1] = kernel[:, 0] + np.abs(kernel[:, 1])  # z_1 - z_0 is convex
    model.layers[-1].set_weights([kernel, bias])
    x, y = rows(20, np.random.default_rng(3)), np.zeros(20, "int32")
    found = PerturbationSet(categories=[Category([2, 3, 4], 0.4)])
    rho = 0.75  # one switch, and moves of 0.35
    exact = np.array(
        [np.diff(model(corners(found, row_, rho))).max() for row_ in x]
    )
    hull = compiled_bounds(model, found).margins(methods.find("rub"))
    hull = hull(x, y, np.full(20, rho, "float32")).numpy()[:, 0]
    assert (hull >= exact - 1e-5).all()
    # The boundary goes between the two where the hull is loosest.
    row_ = np.argmax(hull - exact)
    assert hull[row_] > exact[row_] + 1e-3
    shift = (hull + exact)[row_] / 2
    model.layers[-1].set_weights([kernel, bias - [0, shift]])
    result = keras_rub.certify(
        model, x, y, rho=rho, perturbations=found, method="rub"
    )
    right = result.predicted == 0
    assert (result.certified == (exact < shift))[right].all()
    split = result.certified & (hull > shift)
    assert split[row_]
    np.testing.assert_allclose(
        result.margins[split, 1], exact[split] - shift, atol=1e-5
    )


def corners(found, row_, rho):
    """The corners of the ball around each row that one switch reaches."""
    starts, spent = switched_rows(
        found.categories, row_, rho, (np.full(8, 9.0),) * 2, 100
    )
    free = np.flatnonzero(found.reach((8,)))
    points = []
    for start, price in zip(starts, spent, strict=True):
        for column in free:
            for sign in (1, -1):
                point = start.copy()
                point[column] += sign * (rho - price)
                points.append(point)
    return np.array(points, "float32")


def test_a_price_above_rho_buys_nothing(model):
    rng = np.random.default_rng(4)
    x = rows(6, rng)
    dear = PerturbationSet(categories=[Category([2, 3, 4], 0.5), Ordinal(7)])
    fixed = PerturbationSet(mask=[1, 1, 0, 0, 0, 1, 1, 0])
    y = model(x).numpy().argmax(axis=-1)
    a, b = (
        keras_rub.certify(
            model, x, y, rho=0.49, perturbations=found, method="rub"
        )
        for found in (dear, fixed)
    )
    np.testing.assert_array_equal(a.certified, b.certified)
    np.testing.assert_allclose(a.margins, b.margins, atol=1e-4)


@pytest.mark.medium
def test_radius_is_proved(model):
    x = rows(6, np.random.default_rng(5))
    y = model(x).numpy().argmax(axis=-1)
    settings = {"perturbations": attacker(), "max_radius": 30.0}
    found = {
        method: keras_rub.certified_radius(
            model, x, y, method=method, **settings
        )
        for method in ("rub", "exact")
    }
    assert (found["rub"] <= found["exact"] * 1.011 + 1e-4).all()
    for method, radius in found.items():
        result = keras_rub.certify(
            model, x, y, rho=radius, perturbations=attacker(), method=method
        )
        assert result.certified.all() or method == "exact"
    # A little further there is a counterexample.
    beyond = found["exact"] * 1.02 + 1e-3
    result = keras_rub.certify(
        model, x, y, rho=beyond, perturbations=attacker(), method="exact"
    )
    assert result.broken[found["exact"] < 29.0].all()


@pytest.mark.slow
def test_a_million_points():
    rng = np.random.default_rng(6)
    table = rng.uniform(0.1, 1.5, [3, 3])
    sets = [
        attacker(),
        attacker(input_range=None, mask=[0, 1, 1, 1, 1, 1, 1, 1]),
        attacker(categories=[Category([2, 3, 4], table), Ordinal(7, 2, 0.7)],
                 weights=[0.5, 2.0, 1, 1, 1, 1, 1, 1],
                 mask=[1, 1, 1, 1, 1, 0, 0, 1]),
    ]  # fmt: skip
    models = [network(8), network(6, 6, classes=2)]
    total = 0
    for found in sets:
        for model in models:
            for _ in range(4):
                shapes = [w.shape for w in model.get_weights()]
                model.set_weights([rng.normal(0, 0.7, s) for s in shapes])
                x = rows(16, rng)
                y = model(x).numpy().argmax(axis=-1)
                for rho in (0.28, 0.62, 1.4):
                    for method in ("rub", "crown", "ibp", "exact"):
                        result = keras_rub.certify(
                            model, x, y,
                            rho=rho, perturbations=found, method=method,
                        )  # fmt: skip
                        total += check(model, found, x, y, rho, result, 60, rng)
    print(f"{total} points, 0 violations")
    assert total >= 1_000_000


# The exact method ------------------------------------------------------------


def by_patterns(model, found, x, label, rho):
    """The largest margin, by one linear program an activation pattern."""
    hidden, last = model.layers
    w, b = (part.astype("float64") for part in hidden.get_weights())
    v, c = (part.astype("float64") for part in last.get_weights())
    width, size = w.shape[1], len(x)
    reach = found.reach((size,))
    room = [part.numpy() for part in found.room(tf.constant(x)) or ()]
    room = room or [np.full(size, np.inf)] * 2
    starts, spent = switched_rows(found.categories, x, rho, room, 10**6)
    best = -np.inf
    for start, price in zip(starts, spent, strict=True):
        left = rho - price
        limits = [
            (0, min(left * r, space)) for part in room
            for r, space in zip(reach, part, strict=True)
        ]  # fmt: skip
        cost = np.where(reach > 0, 1 / np.where(reach > 0, reach, 1), 0)
        norm_rows, norm_ends = [np.concatenate([cost, cost])], [left]
        if found.norm == "inf":
            norm_rows, norm_ends = [], []
        base = start.astype("float64") @ w + b
        for pattern in itertools.product([0.0, 1.0], repeat=width):
            on = np.array(pattern)
            sign = 1 - 2 * on  # z >= 0 where on
            lines = np.concatenate([w, -w]).T * sign[:, None]
            for rival in range(v.shape[1]):
                if rival == label:
                    continue
                out = on * (v[:, rival] - v[:, label])
                slope = w @ out
                got = optimize.linprog(
                    -np.concatenate([slope, -slope]),
                    A_ub=np.array([*norm_rows, *lines]),
                    b_ub=np.array([*norm_ends, *(-sign * base)]),
                    bounds=limits,
                )
                if got.status == 0:
                    height = base @ out + c[rival] - c[label]
                    best = max(best, height - got.fun)
    return best


@pytest.mark.parametrize("norm", [1, "inf"])
def test_exact_agrees_with_all_patterns(norm):
    keras.utils.set_random_seed(1)
    model = network(4)
    x = rows(8, np.random.default_rng(7))
    y = model(x).numpy().argmax(axis=-1)
    found = PerturbationSet(
        norm,
        mask=[1, 1, 1, 1, 1, 0, 0, 1],
        weights=[1, 2, 1, 1, 1, 1, 1, 1],
        input_range=(LOW, HIGH),
        categories=[GROUPS[0], GROUPS[2]] if norm == 1 else None,
    )
    for rho in (0.1, 0.5, 0.8):
        result = keras_rub.certify(
            model, x, y, rho=rho, perturbations=found, method="exact"
        )
        assert not result.undecided.any()
        worst = [
            by_patterns(model, found, row_, label, rho)
            for row_, label in zip(x, y, strict=True)
        ]
        np.testing.assert_array_equal(result.certified, np.array(worst) < 0)
    assert "not decided=0.00%" in repr(result)


def test_exact_on_a_network_that_is_no_chain():
    model, rng = with_skip(), np.random.default_rng(11)
    # Without it a dead network ties, which is neither certified nor broken.
    model.layers[-1].bias.assign([0.1, 0.0, -0.1])
    x = rows(6, rng)
    y = model(x).numpy().argmax(axis=-1)
    for rho in (0.2, 0.7):
        result = keras_rub.certify(
            model, x, y, rho=rho, perturbations=attacker(), method="exact"
        )
        check(model, attacker(), x, y, rho, result, 100, rng)
        assert not result.undecided.any()
    assert result.broken.any()


def test_exact_says_what_it_can_not_do(model):
    x = rows(2, np.random.default_rng(8))
    with pytest.raises(ValueError, match="`exact` can't do norm 2"):
        keras_rub.certify(model, x, rho=0.1, norm=2, method="exact")
    smooth = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "elu")])
    smooth.add(keras.layers.Dense(2))
    with pytest.raises(ValueError, match="ReLU and LeakyReLU only"):
        keras_rub.certify(smooth, x, rho=0.1, method="exact")
    late = keras_rub.certify(
        model, x, rho=1.5, norm=1, method="exact", time_limit=1e-9
    )
    assert not late.broken.any()
    assert (late.undecided == ~late.certified).all()
    with pytest.raises(ValueError, match="`time_limit`"):
        keras_rub.certify(model, x, rho=1.5, method="exact", time_limit=0)


# All that works with the set -------------------------------------------------


@pytest.mark.medium
def test_training_saving_evaluation_export(tmp_path):
    keras.utils.set_random_seed(2)
    rng = np.random.default_rng(9)
    x = rows(64, rng)
    y = (x[:, 0] + x[:, 2] > 0.3).astype("int32")
    model = keras_rub.RUBModel(network(6, classes=2), 0.4, categories=GROUPS)
    model.compile("adam", "sparse_categorical_crossentropy")
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.perturbations == model.perturbations

    x, y = x[:16], y[:16]
    result = keras_rub.evaluate(
        loaded, x, y, radii=[0.4], attacks=["switch", "pgd"]
    )
    assert "categories" in str(result.perturbations)
    assert not any("bug" in warning for warning in result.warnings)
    broken = ~result.standing["1"]["switch"][0]
    assert not (broken & result.certified["1"][0]).any()
    # The attack finds what is there, on so small a network.
    exact = keras_rub.certify(loaded, x, y, rho=0.4, method="exact")
    assert (exact.broken & ~broken).sum() <= 1

    folder = keras_rub.export(model, tmp_path / "served")
    config = keras_rub.serving.read_metadata(folder)["certificates"]
    assert len(config["categories"]) == 3
    served = tf.saved_model.load(str(folder)).signatures["certify"]
    bad = x.copy()
    bad[0, 2:5] = 0.5
    got = served(x=tf.constant(bad), rho=tf.fill([16], 0.4))
    assert not got["certified"][0]
    by_graph = got["certified"].numpy()
    own = keras_rub.certify(loaded, x, rho=0.4).certified
    assert by_graph[1:].sum() > 0
    assert (own[1:] >= by_graph[1:]).all()


def test_rows_without_a_category(model):
    bad = X.copy()
    bad[0, 2:5] = 0.0
    message = "single 1, and 0 elsewhere"
    with pytest.raises(ValueError, match=message):
        keras_rub.certify(model, bad, rho=0.1, categories=GROUPS)
    with pytest.raises(ValueError, match=message):
        keras_rub.attacks.make("switch", model, 1, categories=GROUPS)(
            bad, [0, 0], 0.1
        )
    for kind in (keras_rub.ARUBModel, keras_rub.PGDModel):
        with pytest.raises(ValueError, match="can't switch `categories`"):
            kind(model, 0.1, perturbations=attacker(input_range=None))
    with pytest.raises(ValueError, match="for an attacker with `categories`"):
        keras_rub.attacks.make("switch", model, 1)
    with pytest.raises(ValueError, match="foolbox knows no"):
        keras_rub.attacks.make("foolbox-pgd", model, 1, categories=GROUPS)
