"""Projections and gradient ascent."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy.optimize import minimize

import keras_rub
from keras_rub.attacks import ascend, project
from keras_rub.attacks.ascent import steepest_step

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

    @tf.function
    def nearest(d):
        return project(d, tf.constant(x), rho, perturbations)

    found = nearest(tf.constant(d)).numpy()
    assert np.all(size(found, norm, weights) <= rho + 1e-5)
    assert np.all(found[:, 2] == 0.0)
    if limited:
        assert np.all((x + found >= -1e-6) & (x + found <= 1 + 1e-6))
    again = nearest(tf.constant(found)).numpy()
    np.testing.assert_allclose(again, found, atol=2e-6)
    # No other point of the set is nearer.
    target = d * mask
    for _ in range(200):
        other = rng.normal(scale=1.0, size=(40, 6))
        other = nearest(tf.constant(other, tf.float32)).numpy()
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


def test_l1_step_moves_the_share_of_each_sample(rng):
    gradient = rng.normal(size=(6, 10)).astype("float32")
    gradient[3, 2:] = 0.0  # fewer than the share have a gradient
    gradient[4] = 0.0
    gradient[5, :4] = gradient[5, 4]  # ties share the move
    share = np.array([0.0, 0.25, 1.0, 0.5, 0.3, 0.2], "float32")
    expected = np.zeros_like(gradient)
    for row, part, out in zip(gradient, share, expected, strict=True):
        count = max(1, int(np.ceil(part * len(row))))
        least = np.sort(np.abs(row))[-count]
        chosen = (np.abs(row) >= least) & (row != 0)
        out[chosen] = np.sign(row[chosen]) / chosen.sum()
    zeros = tf.zeros_like(gradient)
    found = steepest_step(
        tf.constant(gradient),
        zeros,
        zeros,
        keras_rub.PerturbationSet(1),
        tf.constant(share),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@NORMS
@pytest.mark.parametrize(
    "wrap",
    [
        keras_rub.BaselineModel,
        keras_rub.PGDModel,
        keras_rub.FGSMModel,
        keras_rub.COAPModel,
        keras_rub.IBPModel,
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


RANGE = {"input_range": (0.0, 1.0)}
# Without one, intervals stay at chance.
RAMP = keras.optimizers.schedules.PolynomialDecay(0.0, 150, 0.05)


def accuracies(wrap, norm, attacked):
    """Of a trained network: clean, and under an attack of this radius."""
    data = keras_rub.datasets.load("digits")
    x, y = data.test
    keras.utils.set_random_seed(0)
    base = keras_rub.models.mlp((64,), 10, hidden=(48,))
    model = wrap(base)
    model.compile(
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(*data.train, epochs=12, batch_size=64, verbose=0)
    attack = keras_rub.attacks.PGD(base, norm, steps=20, **RANGE)
    points = attack(x, y, attacked)
    return [np.mean(attack.predict(found) == y) for found in (x, points)]


@functools.cache
def nominal_accuracies(norm, attacked):
    return accuracies(lambda base: base, norm, attacked)


@pytest.mark.parametrize(
    ("wrap", "norm", "attacked"),
    [
        (lambda base: keras_rub.BaselineModel(base, 0.1), "inf", 0.1),
        (lambda base: keras_rub.PGDModel(base, 0.1, **RANGE), "inf", 0.1),
        (lambda base: keras_rub.FGSMModel(base, 0.1, **RANGE), "inf", 0.1),
        (lambda base: keras_rub.COAPModel(base, 0.03, **RANGE), "inf", 0.1),
        (lambda base: keras_rub.IBPModel(base, RAMP, **RANGE), "inf", 0.1),
        (lambda base: keras_rub.ARUBModel(base, 0.1), "inf", 0.1),
        (lambda base: keras_rub.RUBModel(base, 1.0, **RANGE), 1, 2.0),
    ],
    ids=["baseline", "pgd", "fgsm", "coap", "ibp", "arub", "rub"],
)
def test_each_defence_beats_nominal_training(wrap, norm, attacked):
    nominal = nominal_accuracies(norm, attacked)
    robust = accuracies(wrap, norm, attacked)
    assert robust[0] > 0.88
    assert robust[1] > nominal[1] + 0.05


# Attacks ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim():
    """A network trained on digits, and samples that it gets right."""
    data = keras_rub.datasets.load("digits")
    keras.utils.set_random_seed(0)
    base = keras_rub.models.mlp((64,), 10, hidden=(32,))
    base.compile(
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    base.fit(*data.train, epochs=10, batch_size=64, verbose=0)
    x, y = (part[:80] for part in data.test)
    right = base.predict(x, verbose=0).argmax(-1) == y
    return base, x[right], y[right]


@pytest.fixture(scope="module")
def robust():
    """A network that RUB trained."""
    data = keras_rub.datasets.load("digits")
    keras.utils.set_random_seed(0)
    model = keras_rub.RUBModel(
        keras_rub.models.mlp((64,), 10, hidden=(16,)), rho=0.5
    )
    model.compile(
        keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy"
    )
    model.fit(*data.train, epochs=6, batch_size=64, verbose=0)
    return model


RADII = {1: 1.0, 2: 0.4, "inf": 0.08}


# That of categories has tests of its own.
NAMES = [name for name in keras_rub.attacks.NAMES if name != "switch"]


@NORMS
@pytest.mark.parametrize("name", NAMES)
def test_attack_stays_inside_and_wins(name, norm, victim):
    base, x, y = victim
    attack = keras_rub.attacks.make(name, base, norm, input_range=(0, 1))
    rho = np.float32(RADII[norm]) * (np.arange(len(x)) % 3) / 2
    points = attack(x, y, rho)
    assert points.shape == x.shape and points.dtype == np.float32
    assert np.all(size(points - x, norm) <= rho * (1 + 1e-4) + 1e-6)
    assert points.min() >= 0.0 and points.max() <= 1.0
    sweep = attack.sweep(x, y, [RADII[norm], 4 * RADII[norm]])
    near, far = ((attack.predict(found) == y).mean() for found in sweep)
    assert far < near <= 1.0


@pytest.mark.medium
@NORMS
def test_strong_is_never_weaker_than_the_paper(norm, victim, robust):
    """On this network and on one that RUB trained."""
    base, x, y = victim
    x, y = x[:40], y[:40]
    own = [n for n in keras_rub.attacks.STRONG if "foolbox" not in n]
    for model in (base, robust):
        for rho in (0.5 * RADII[norm], RADII[norm]):
            left = {}
            for attacks in ("paper", "strong", tuple(own)):
                suite = keras_rub.attacks.Suite(
                    model, norm, attacks, input_range=(0, 1)
                )
                points = suite(x, y, rho)
                found = model.predict(points, verbose=0).argmax(-1)
                left[attacks] = np.mean(found == y)
            assert left["strong"] <= left["paper"]
            # Not only because the paper's attacks are among them.
            assert left[tuple(own)] <= left["paper"]


@NORMS
def test_adaptive_attack_beats_the_paper_clearly(norm, victim):
    base, x, y = victim

    def left(name):
        attack = keras_rub.attacks.make(name, base, norm, input_range=(0, 1))
        return np.mean(attack.predict(attack(x, y, RADII[norm])) == y)

    assert left("apgd-ce") <= left("foolbox-pgd")
    if norm == 1:
        assert left("apgd-ce") < left("foolbox-pgd") - 0.1


@NORMS
@pytest.mark.parametrize("loss", ["cross_entropy", "log_odds", "margin_ratio"])
@pytest.mark.parametrize("kind", ["PGD", "AdaptivePGD"])
def test_targeted(kind, loss, norm, victim):
    base, x, y = victim
    x, y = x[:20], y[:20]
    make = getattr(keras_rub.attacks, kind)
    attack = make(base, norm, loss=loss, input_range=(0, 1))
    targets = (y + 1) % 10
    rho = 8 * RADII[norm]
    points = attack(x, y, rho, targets)
    assert np.all(size(points - x, norm) <= rho * (1 + 1e-4))
    assert np.mean(attack.predict(points) == targets) > 0.7
    # A target that is the label asks for nothing.
    np.testing.assert_array_equal(attack(x, y, rho, y), x)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_losses_win_where_they_are_positive(classes, rng):
    from keras_rub.attacks import losses

    logits = tf.constant(rng.normal(size=(50, classes)), tf.float32)
    labels = tf.constant(rng.integers(0, classes, 50), tf.int32)
    targets = (labels + 1) % classes
    won = losses.has_won(logits, labels, None)
    np.testing.assert_array_equal(
        losses.margin_ratio(logits, labels, None) > 0, won
    )
    ratio = losses.margin_ratio(logits, labels, targets)
    assert np.all(ratio[losses.has_won(logits, labels, targets)] > 0)
    if classes > 2:
        # No confidence can flatten it.
        np.testing.assert_allclose(
            losses.margin_ratio(100.0 * logits + 7.0, labels, targets),
            ratio,
            rtol=2e-3,
            atol=1e-4,
        )


def test_log_odds_are_the_cross_entropy_without_its_rounding(rng):
    from keras_rub.attacks import losses

    logits = tf.Variable(rng.normal(size=(50, 4)), dtype=tf.float32)
    labels = tf.constant(rng.integers(0, 4, 50), tf.int32)
    for targets in (None, (labels + 1) % 4):
        found, gradients = [], []
        for loss in (losses.log_odds, losses.cross_entropy):
            with tf.GradientTape() as tape:
                found.append(loss(logits, labels, targets))
            gradient = tape.gradient(found[-1], logits)
            gradients.append(gradient / tf.norm(gradient, axis=1)[:, None])
        # softplus of one, or minus softplus of minus one, is the other
        odds, entropy = found
        sign = 1.0 if targets is None else -1.0
        np.testing.assert_allclose(
            sign * tf.nn.softplus(sign * odds), entropy, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(*gradients, atol=1e-5)
    sure = tf.Variable([[30.0, 0.0, 1.0]])
    for loss, flat in ((losses.cross_entropy, True), (losses.log_odds, False)):
        with tf.GradientTape() as tape:
            value = loss(sure, tf.constant([0]), None)
        own = tape.gradient(value, sure)[0, 0]
        assert (own == 0.0) == flat


def test_confidence_hides_nothing_from_log_odds(victim):
    """Larger logits, the same classes: PGD goes where it went."""
    base, x, y = victim
    large = keras.models.clone_model(base)
    *others, kernel, bias = base.get_weights()
    large.set_weights([*others, 1e4 * kernel, 1e4 * bias])

    def left(model, loss):
        attack = keras_rub.attacks.PGD(model, "inf", loss=loss)
        return np.mean(attack.predict(attack(x, y, RADII["inf"])) == y)

    plain = left(base, "log_odds")
    assert left(large, "log_odds") <= plain + 0.05
    assert left(large, "cross_entropy") > plain + 0.1


def test_same_seed_same_points(victim):
    base, x, y = victim
    first, second, other = (
        keras_rub.attacks.PGD(base, seed=seed, steps=3)(x, y, 0.05)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-4


def test_restarts_help_and_never_hurt(victim):
    base, x, y = victim

    def left(restarts):
        attack = keras_rub.attacks.PGD(base, restarts=restarts, steps=2)
        return np.mean(attack.predict(attack(x, y, 0.04)) == y)

    assert left(8) <= left(1)


class Counting(layers.Layer):
    """Counts how often Python, and so a trace, passes through."""

    passes = 0

    def call(self, x):
        Counting.passes += 1
        return x


def resident_megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


@pytest.mark.medium
@pytest.mark.parametrize("name", ["pgd", "apgd-ce"])
def test_no_retracing_and_no_memory_growth(name, victim):
    base, x, y = victim
    inputs = keras.Input((64,))
    watched = keras.Model(inputs, base(Counting()(inputs)))
    attack = keras_rub.attacks.make(
        name, watched, 2, input_range=(0, 1), steps=5
    )
    for count in (7, 1, 7):
        attack(x[:count], y[:count], 0.02)
    passes, before = Counting.passes, resident_megabytes()
    for call in range(200):
        count = 1 + call % 7
        attack(x[:count], y[:count], 0.01 + 1e-4 * call)
    assert Counting.passes == passes
    assert resident_megabytes() - before < 20.0


def test_clear_errors(victim):
    base, x, y = victim
    attack = keras_rub.attacks.PGD(base, input_range=(0, 1))
    with pytest.raises(ValueError, match="leaves `input_range`"):
        attack(x + 2.0, y, 0.1)
    with pytest.raises(ValueError, match="`rho` must be finite"):
        attack(x, y, -0.1)
    with pytest.raises(ValueError, match="one radius a sample"):
        attack(x, y, [0.1, 0.2])
    with pytest.raises(ValueError, match="`radii` must hold"):
        attack.sweep(x, y, [])
    with pytest.raises(ValueError, match="one class a sample"):
        attack(x, y, 0.1, targets=[1])
    with pytest.raises(ValueError, match="`loss` must be"):
        keras_rub.attacks.PGD(base, loss="hinge")
    with pytest.raises(ValueError, match="`steps` must be"):
        keras_rub.attacks.AdaptivePGD(base, steps=0)
    with pytest.raises(ValueError, match="untargeted"):
        keras_rub.attacks.FoolboxAttack(base)(x, y, 0.1, (y + 1) % 10)
    with pytest.raises(ValueError, match="one valid range"):
        keras_rub.attacks.FoolboxAttack(base, input_range=(0, np.ones(64)))
    with pytest.raises(TypeError, match="keras.Model"):
        keras_rub.attacks.PGD(lambda x: x)


def test_model_without_gradients(victim):
    _, x, y = victim
    blind = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Lambda(lambda t: tf.cast(tf.cast(t, tf.int32), tf.float32)),
            layers.Dense(10),
        ]
    )
    for name in ("pgd", "apgd-ce"):
        with pytest.raises(ValueError, match="no gradient with respect to"):
            keras_rub.attacks.make(name, blind)(x, y, 0.1)
