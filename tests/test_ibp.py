"""IBP training: closed forms, its options, and what it is for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub
from keras_rub import training
from keras_rub.bounds.intervals import Ball, IntervalBound
from keras_rub.bounds.lowering import lower
from keras_rub.defenses.ibp_model import explosion_and_imbalance

LOSS = "sparse_categorical_crossentropy"


def net(inputs=4, hidden=6):
    return keras.Sequential(
        [
            layers.Input((inputs,)),
            layers.Dense(hidden, activation="relu"),
            layers.Dense(3),
        ]
    )


@pytest.fixture
def data(rng):
    x = rng.uniform(size=(8, 4)).astype("float32")
    return x, rng.integers(0, 3, 8)


def plain_margins(model, x, y, rho, norm):
    """The margins of a network of two layers, written out."""
    kernel, shift, last, shifts = (weight.value for weight in model.weights)
    dual = {1: np.inf, 2: 2, "inf": 1}[norm]
    center = tf.constant(x) @ kernel + shift
    reach = rho * tf.norm(kernel, ord=dual, axis=0)
    low = tf.nn.relu(center - reach)
    high = tf.nn.relu(center + reach)
    own = tf.gather(tf.transpose(last), y)
    rows = tf.transpose(last)[None] - own[:, None]  # [n, K, H]
    bias = shifts[None] - tf.gather(shifts, y)[:, None]
    middle = tf.linalg.matvec(rows, (low + high) / 2)
    return middle + tf.linalg.matvec(tf.abs(rows), (high - low) / 2) + bias


@pytest.mark.eager
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_one_step_in_closed_form(norm, data):
    x, y = data
    base = net()
    model = keras_rub.IBPModel(base, 0.2, norm, mix=0.7)
    model.compile(keras.optimizers.SGD(0.5), LOSS)
    np.testing.assert_allclose(
        model.worst_case_margins(x, y),
        plain_margins(base, x, y, 0.2, norm),
        atol=1e-5,
    )
    with tf.GradientTape() as tape:
        logits = base(x)
        robust = plain_margins(base, x, y, 0.2, norm)
        losses = [
            tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            )
            for outputs in (robust, logits)
        ]
        total = 0.7 * losses[0] + 0.3 * losses[1]
    expected = [
        weight - 0.5 * gradient
        for weight, gradient in zip(
            base.trainable_weights,
            tape.gradient(total, base.trainable_weights),
            strict=True,
        )
    ]
    logs = model.train_on_batch(x, y, return_dict=True)
    assert logs["loss"] == pytest.approx(float(total), rel=1e-5)
    for weight, value in zip(base.trainable_weights, expected, strict=True):
        np.testing.assert_allclose(weight, value, atol=1e-5)


def test_the_bound_is_that_of_certify(data):
    x, y = data
    for bound in ("ibp", "crown-ibp"):
        model = keras_rub.IBPModel(net(), 0.2, bound=bound)
        np.testing.assert_allclose(
            model.worst_case_margins(x, y),
            keras_rub.certify(model, x, y, rho=0.2, method=bound).margins,
            atol=1e-5,
        )


@pytest.mark.parametrize("bound", ["ibp", "crown-ibp"])
def test_training_lowers_the_bound(bound, data):
    x, y = data
    model = keras_rub.IBPModel(net(), 0.05, bound=bound, input_range=(0, 1))
    model.compile(keras.optimizers.Adam(0.02), LOSS)
    losses = [model.train_on_batch(x, y)[0] for _ in range(40)]
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.8 * losses[0]


@pytest.mark.eager
def test_limits_of_the_weight_between_bound_and_attack(data):
    """1 is the bound alone, 0 is adversarial training, between is between."""
    x, y = data
    base = net()

    def loss_of(model):
        model.compile("sgd", LOSS)
        keras.utils.set_random_seed(1)
        tf.random.set_seed(1)
        return model.test_on_batch(x, y, return_dict=True)["loss"]

    def ibp(**settings):
        return loss_of(keras_rub.IBPModel(base, 0.2, **settings))

    plain, alone = ibp(), ibp(bound_weight=1.0, attack_steps=7)
    assert plain == alone
    for steps in (1, 4):
        attacked = ibp(bound_weight=0.0, attack_steps=steps)
        pgd = loss_of(
            keras_rub.PGDModel(base, 0.2, steps=steps, step_size=2.5 / steps)
        )
        assert attacked == pytest.approx(pgd, rel=1e-6)
        between = ibp(bound_weight=0.3, attack_steps=steps)
        assert between == pytest.approx(0.3 * plain + 0.7 * attacked, rel=1e-5)
        assert attacked <= plain


@pytest.mark.eager
def test_warm_up_ends_with_the_ramp(data):
    x, y = data
    base = net()
    base.layers[0].kernel.assign(5.0 * base.layers[0].kernel)

    def trained_loss(rho, **settings):
        weights = base.get_weights()
        model = keras_rub.IBPModel(base, rho, **settings)
        model.compile(keras.optimizers.SGD(0.0), LOSS)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(5)
        loss = model.train_on_batch(x, y, return_dict=True)["loss"]
        # Old ones of Keras take the mean over calls for one batch.
        model.reset_metrics()
        model.optimizer.iterations.assign(5)
        tested = model.test_on_batch(x, y, return_dict=True)["loss"]
        base.set_weights(weights)
        return float(loss), float(tested)

    def ramp(steps):
        return keras.optimizers.schedules.PolynomialDecay(0.0, steps, 0.2)

    # Half of the way: half of the weight, and none in validation.
    loss, tested = trained_loss(ramp(10))
    bound = IntervalBound(
        lower(base), Ball(tf.constant(x), 0.1, keras_rub.PerturbationSet("inf"))
    )
    penalty = float(explosion_and_imbalance(bound))
    assert penalty > 0.01
    assert loss == pytest.approx(tested + 0.5 * 0.5 * penalty, rel=1e-4)
    assert trained_loss(ramp(10), warmup=0.0)[0] == pytest.approx(tested)
    loss, tested = trained_loss(ramp(5))  # at the end of it
    assert loss == pytest.approx(tested)
    loss, tested = trained_loss(0.2)  # without a ramp
    assert loss == pytest.approx(tested)


def test_penalties_in_closed_form():
    """One layer whose ranges and signs are known."""
    base = net(inputs=2, hidden=2)
    base.set_weights(
        [
            np.array([[4.0, 0.0], [0.0, 4.0]], "float32"),
            np.zeros(2, "float32"),
            np.ones((2, 3), "float32"),
            np.zeros(3, "float32"),
        ]
    )
    x = tf.constant([[3.0, -1.0]])
    attacker = keras_rub.PerturbationSet("inf")
    bound = IntervalBound(lower(base), Ball(x, 0.1, attacker))
    # Ranges grow fourfold, 0.25 of the input's: half of what is asked.
    # Centers 12 and -4: means in the ratio 1 / 3, variances are equal.
    expected = (0.5 - 0.25) / 0.5 + (0.5 - 1.0 / 3.0) / 0.5
    found = explosion_and_imbalance(bound)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    # No radius, no activation that is off: nothing to say.
    bound = IntervalBound(lower(base), Ball(tf.abs(x), 0.0, attacker))
    assert float(explosion_and_imbalance(bound)) == 0.0


def test_penalties_have_a_finite_gradient(rng):
    base = keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(4, activation="relu"),
            layers.Dense(4, activation="sigmoid"),
            layers.Dense(2),
        ]
    )
    program = lower(base)
    attacker = keras_rub.PerturbationSet(2)
    x = tf.constant(rng.normal(size=(3, 5)), tf.float32)
    for scale, rho in ((0.0, 0.1), (1.0, 0.0), (1.0, 1e4)):
        for weight in base.trainable_weights:
            weight.assign(scale * rng.normal(size=weight.shape))
        with tf.GradientTape() as tape:
            bound = IntervalBound(program, Ball(x, rho, attacker))
            value = explosion_and_imbalance(bound)
        gradients = tape.gradient(
            value,
            [weight.value for weight in base.trainable_weights],
            unconnected_gradients="zero",
        )
        assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bound": "crown"}, "one of ibp, crown-ibp.*`bound='crown'`"),
        ({"bound_weight": 1.5}, "between 0 and 1.*`bound_weight=1.5`"),
        ({"attack_steps": 0}, "at least 1.*`attack_steps=0`"),
        ({"warmup": -1.0}, "`warmup` must be.*`warmup=-1.0`"),
    ],
)
def test_bad_options(settings, message):
    with pytest.raises(ValueError, match=message):
        keras_rub.IBPModel(net(), 0.1, **settings)


def test_options_are_saved(tmp_path):
    model = keras_rub.IBPModel(
        net(),
        keras.optimizers.schedules.PolynomialDecay(0.0, 5, 0.2),
        bound="crown-ibp",
        bound_weight=0.25,
        attack_steps=3,
        warmup=0.1,
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for name in ("bound", "bound_weight", "attack_steps", "warmup"):
        assert loaded.get_config()[name] == model.get_config()[name]


def test_initializer_keeps_the_width_of_ranges():
    """A range grows in no layer, where Glorot's weights let it explode."""
    keras.utils.set_random_seed(0)
    widths = {}
    for name, initializer in (
        ("ibp", keras_rub.IBPInitializer()),
        ("glorot", "glorot_uniform"),
    ):
        base = keras_rub.models.mlp((100,), 10, (400, 400, 400))
        for layer in base.layers:
            layer.kernel.assign(
                keras.initializers.get(initializer)(layer.kernel.shape)
            )
        bound = IntervalBound(
            lower(base),
            Ball(tf.zeros([1, 100]), 0.1, keras_rub.PerturbationSet("inf")),
        )
        widths[name] = [
            float(tf.reduce_mean(high - low)) for low, high in bound.sources
        ]
    assert 0.05 < widths["ibp"][-1] < 1.0
    assert widths["glorot"][-1] > 50.0 * widths["ibp"][-1]
    again = keras_rub.IBPInitializer(seed=3)
    copy = keras_rub.IBPInitializer.from_config(again.get_config())
    np.testing.assert_array_equal(again((5, 4)), copy((5, 4)))


@pytest.mark.medium
def test_certified_digits():
    """It does what it is for: certificates where nominal training has none."""
    data = keras_rub.datasets.load("digits")
    shares = {}
    for name in ("nominal", "ibp"):
        recipe = training.Recipe(
            defense=name,
            norm="inf",
            rho=0.1,
            input_range=name == "ibp",
            architecture="mlp1",
            learning_rate=5e-3,
            steps=300,
        )
        model = recipe.build(data)
        recipe.fit(model, data, verbose=0)
        found = keras_rub.certify(
            model,
            *data.test,
            rho=0.1,
            norm="inf",
            input_range=data.input_range,
            method="fast",
            decide_only=True,
        )
        shares[name] = found.certified_accuracy
    assert shares["ibp"] > 0.7
    assert shares["ibp"] > shares["nominal"] + 0.3
