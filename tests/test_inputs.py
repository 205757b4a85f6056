"""Classifiers of several inputs, of which an attacker moves one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.testing import assert_allclose

import keras_rub
from keras_rub.inputs import SingleInput
from tests.reference import randomise

SIZE, TOKENS = 4, 2


def network(structure=dict, activation="relu", head=None):
    """A vector that moves, words that are looked up, and a number."""
    inputs = {
        "signal": keras.Input((SIZE,), name="signal"),
        "words": keras.Input((TOKENS,), dtype="int32", name="words"),
        "age": keras.Input((1,), name="age"),
    }
    words = layers.Flatten()(layers.Embedding(7, 3)(inputs["words"]))
    age = layers.Dense(2, "tanh", name="of_age")(inputs["age"])
    h = layers.Concatenate()([inputs["signal"], words, age])
    h = layers.Dense(6, activation, name="hidden")(h)
    outputs = layers.Dense(3, head, name="last")(h)
    given = inputs if structure is dict else list(inputs.values())
    return keras.Model(given, outputs)


def samples(rng, count=5, structure=dict):
    x = {
        "signal": rng.uniform(size=(count, SIZE)).astype("float32"),
        "words": rng.integers(0, 7, (count, TOKENS)),
        "age": rng.normal(size=(count, 1)).astype("float32"),
    }
    return x if structure is dict else list(x.values())


@pytest.fixture(scope="module")
def single():
    """The network of `alone`, which is compiled once."""
    return keras.Sequential(
        [keras.Input((SIZE,)), layers.Dense(6, "relu"), layers.Dense(3)]
    )


def alone(single, model, x, i):
    """The same network for one sample, its fixed inputs in the biases."""
    hidden = model.get_layer("hidden")
    fixed = keras.Model(model.input, hidden.input)(x)[i, SIZE:]
    kernel, bias = hidden.get_weights()
    single.layers[0].set_weights(
        [kernel[:SIZE], bias + np.asarray(fixed) @ kernel[SIZE:]]
    )
    single.layers[1].set_weights(model.get_layer("last").get_weights())
    return single


@pytest.fixture(scope="module")
def model():
    return randomise(network(head="softmax"), np.random.default_rng(3))


@pytest.mark.eager
@pytest.mark.parametrize(
    "norm, method, limits",
    [
        (1, "rub", {}),
        (1, "rub", {"input_range": (0.0, 1.0)}),
        (2, "crown", {"mask": [True, False, True, True]}),
        ("inf", "coap", {"weights": [1.0, 2.0, 1.0, 0.5]}),
        ("inf", "crown", {"input_range": (0.0, np.ones(SIZE))}),
    ],
)
def test_certificates_are_those_of_one_input(
    model, single, norm, method, limits, rng
):
    x = samples(rng, 3)
    settings = {
        "rho": 0.1, "norm": norm, "method": method, "verbose": 0, **limits
    }  # fmt: skip
    found = keras_rub.certify(model, x, perturb="signal", **settings)
    assert found.perturbations.perturb == "signal"
    for i in range(3):
        other = keras_rub.certify(
            alone(single, model, x, i),
            x["signal"][[i]],
            [found.labels[i]],
            **settings,
        )
        assert_allclose(found.margins[i], other.margins[0], atol=2e-5)
        assert found.certified[i] == other.certified[0]


@pytest.mark.eager
@pytest.mark.medium
def test_radii_data_sets_lists_and_the_only_float_input(rng):
    x = samples(rng)
    named = randomise(network(), np.random.default_rng(3))
    listed = randomise(network(list), np.random.default_rng(3))
    settings = {"perturb": "signal", "method": "rub", "verbose": 0}
    y = named.predict(x, verbose=0).argmax(1)
    radius = keras_rub.certified_radius(named, x, y, **settings)
    assert np.all(radius > 0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    again = keras_rub.certified_radius(named, data, **settings)
    assert_allclose(radius, again, rtol=1e-6)
    other = keras_rub.certified_radius(listed, list(x.values()), y, **settings)
    assert_allclose(radius, other, rtol=1e-6)
    # Two inputs, one of them of floating point: nothing to be said.
    short = keras.Model(
        {name: named.input[name] for name in ("signal", "words")},
        layers.Dense(2)(
            layers.Concatenate()(
                [
                    named.input["signal"],
                    layers.Flatten()(layers.Embedding(7, 2)(
                        named.input["words"]
                    )),
                ]
            )
        ),
    )  # fmt: skip
    some = {name: x[name] for name in ("signal", "words")}
    assert keras_rub.certify(short, some, rho=1e-3, verbose=0).margins.shape


@pytest.mark.eager
def test_no_point_is_beyond_the_bound(rng):
    model = randomise(network(activation="tanh"), rng)
    x = samples(rng, 2)
    found = keras_rub.certify(
        model, x, rho=0.4, norm=2, perturb="signal", verbose=0
    )
    for i in range(2):
        d = rng.normal(size=(500, SIZE))
        d *= 0.4 / np.linalg.norm(d, axis=1, keepdims=True)
        points = {
            "signal": x["signal"][i] + d,
            "words": np.repeat(x["words"][[i]], 500, 0),
            "age": np.repeat(x["age"][[i]], 500, 0),
        }
        z = model.predict(points, verbose=0)
        margins = z - z[:, found.labels[[i]]]
        assert np.all(margins <= found.margins[i] + 1e-5)


DEFENSES = {
    "RUBModel": {},
    "ARUBModel": {"norm": 2},
    "COAPModel": {},
    "IBPModel": {"bound_weight": 0.5},
    "PGDModel": {"steps": 2},
    "FGSMModel": {},
    "BaselineModel": {},
}


@pytest.mark.eager
@pytest.mark.medium
@pytest.mark.parametrize("name", DEFENSES)
def test_defences_train_all_weights(name, rng, tmp_path):
    base = network(head="softmax")
    x = samples(rng, 16)
    y = (x["signal"].sum(1) > 2).astype("int32")
    robust = getattr(keras_rub, name)(
        base, rho=0.1, perturb="signal", **DEFENSES[name]
    )
    metrics = []
    if name == "RUBModel":
        metrics = [keras_rub.metrics.CertifiedAccuracy(0.05)]
    robust.compile("adam", "sparse_categorical_crossentropy", metrics=metrics)
    before = base.get_weights()
    look = keras_rub.callbacks.Certify(x, y, rho=0.01, norm=1, method="rub")
    history = robust.fit(
        x, y, epochs=1, batch_size=8, verbose=0,
        callbacks=[look] if metrics else [],
    ).history  # fmt: skip
    assert np.all(np.isfinite(history["loss"]))
    # The branches of the fixed inputs are trained as well.
    for old, new, weight in zip(
        before, base.get_weights(), base.weights, strict=True
    ):
        assert np.any(old != new), weight.path
    if metrics:
        assert history["certified_0.05"][0] <= history["certified_0.01"][0]
    assert robust.predict(x, verbose=0).shape == (16, 3)
    robust.save(tmp_path / "robust.keras")
    loaded = keras.models.load_model(tmp_path / "robust.keras")
    assert loaded.perturbations == robust.perturbations
    if hasattr(robust, "worst_case_margins"):
        assert_allclose(
            loaded.worst_case_margins(x, y),
            robust.worst_case_margins(x, y),
            atol=1e-5,
        )


def test_the_robust_loss_is_that_of_one_input(single, rng):
    """RUB's margins of a sample, against those with the others in biases."""
    base = randomise(network(), rng)
    x, y = samples(rng, 3), np.array([0, 1, 2])
    robust = keras_rub.RUBModel(base, 0.2, perturb="signal", vertices="all")
    found = robust.worst_case_margins(x, y)
    other = keras_rub.RUBModel(single, 0.2, vertices="all")
    for i in range(3):
        alone(single, base, x, i)
        known = other.worst_case_margins(x["signal"][[i]], y[[i]])
        assert_allclose(found[i], known[0], atol=1e-5)


@pytest.mark.eager
@pytest.mark.parametrize("structure", [dict, list])
def test_attacks_move_one_input(structure, rng):
    model = randomise(network(structure), rng)
    x = samples(rng, 6, structure)
    y = model.predict(x, verbose=0).argmax(1)
    for kind in (keras_rub.attacks.PGD, keras_rub.attacks.FoolboxAttack):
        attack = kind(model, norm=2, perturb="signal")
        points = attack(x, y, 2.0)
        assert type(points) is type(x)
        parts = points if structure is list else list(points.values())
        given = x if structure is list else list(x.values())
        moved = np.linalg.norm(parts[0] - given[0], axis=1)
        assert np.all(moved <= 2.0 + 1e-3)
        assert moved.max() > 0.5
        for part, clean in zip(parts[1:], given[1:], strict=True):
            assert np.array_equal(part, clean)
        after = model.predict(points, verbose=0).argmax(1)
        assert np.any(after != y)
        assert np.array_equal(after, attack.predict(points))


@pytest.mark.eager
@pytest.mark.medium
def test_evaluate(rng):
    model = randomise(network(), rng)
    x = samples(rng, 12)
    y = model.predict(x, verbose=0).argmax(1)
    settings = {
        "radii": {1: [0.05, 1.0]}, "perturb": "signal", "verbose": 0,
        "attacks": ["foolbox-pgd", "pgd"], "certificates": "rub",
    }  # fmt: skip
    result = keras_rub.evaluate(model, x, y, **settings)
    assert result.clean_accuracy == 1.0
    certified = result.certified["1"]
    for stands in result.standing["1"].values():
        assert np.all(stands | ~certified)
    example = result.examples["1"][0]
    assert example["clean"].shape == example["attacked"].shape == (SIZE,)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    again = keras_rub.evaluate(model, data, **settings)
    assert np.array_equal(again.certified["1"], certified)


@pytest.mark.medium
def test_export_has_all_inputs(model, rng, tmp_path):
    x = samples(rng, 3)
    folder = keras_rub.export(
        model, tmp_path / "served", norm=1, perturb="signal"
    )
    served = tf.saved_model.load(folder)
    tensors = {
        "signal": tf.constant(x["signal"]),
        "words": tf.constant(x["words"], tf.int32),
        "age": tf.constant(x["age"]),
    }
    answer = served.signatures["serving_default"](**tensors)
    assert_allclose(
        answer["probabilities"], model.predict(x, verbose=0), atol=1e-6
    )
    answer = served.signatures["certify"](**tensors, rho=tf.fill([3], 0.05))
    known = keras_rub.certify(
        model, x, rho=0.05, perturb="signal", method="rub", verbose=0
    )
    assert np.array_equal(answer["certified"], known.certified)
    assert np.array_equal(answer["class"], known.predicted)
    radius = served.signatures["certified_radius"](**tensors)["radius"]
    assert_allclose(
        radius,
        keras_rub.certified_radius(
            model, x, perturb="signal", method="rub", verbose=0
        ),
        rtol=0.03,
    )
    facts = keras_rub.serving.read_metadata(folder)
    assert facts["input_shape"] == {
        "signal": [SIZE], "words": [TOKENS], "age": [1]
    }  # fmt: skip
    assert facts["certificates"]["perturb"] == "signal"


def test_packing_leaves_the_model_as_it_was(model, rng, tmp_path):
    x = samples(rng)
    attacker = keras_rub.PerturbationSet(1, perturb="signal")
    single = SingleInput.of(model, attacker)
    packed = single.array(x)
    assert packed.shape == (5, SIZE + 3 * TOKENS + 2)
    assert_allclose(
        tf.nn.softmax(single.network(packed)), model.predict(x, verbose=0),
        atol=1e-6,
    )  # fmt: skip
    back = single.unpack(packed, x)
    assert all(np.array_equal(back[name], x[name]) for name in x)
    model.save(tmp_path / "plain.keras")
    loaded = keras.models.load_model(tmp_path / "plain.keras")
    assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6
    )
    assert SingleInput.of(model, attacker).network is single.network


@pytest.mark.parametrize(
    "change, settings, words",
    [
        ({}, {}, "must name the one input.*'age', 'signal'.*perturb=None"),
        ({}, {"perturb": "words"}, "floating-point input.*perturb='words'"),
        ({}, {"perturb": "wrods"}, "perturb='wrods'"),
        ({"age": None}, {"perturb": "signal"}, "must hold the inputs"),
        ({"age": 3}, {"perturb": "signal"}, "same length.*age of 3"),
        (
            {"signal": 7},
            {"perturb": "signal", "mask": [True] * 3},
            "`mask` must broadcast",
        ),
    ],
)
def test_mistakes(model, change, settings, words, rng):
    x = samples(rng)
    for name, count in change.items():
        if count is None:
            del x[name]
        else:
            x[name] = x[name][:count]
    with pytest.raises(ValueError, match=words):
        keras_rub.certify(model, x, rho=0.1, **settings)


def test_one_input_has_nothing_to_choose():
    model = keras.Sequential([keras.Input((2,), name="x"), layers.Dense(2)])
    x = np.zeros((1, 2))
    assert keras_rub.certify(model, x, rho=0.1, perturb="x", verbose=0)
    with pytest.raises(ValueError, match="has only.*perturb='z'"):
        keras_rub.certify(model, x, rho=0.1, perturb="z")
    with pytest.raises(TypeError, match="Received: `perturb=0`"):
        keras_rub.PerturbationSet(perturb=0)


def test_a_moving_part_without_gradient_is_no_silent_success():
    """That of the other inputs does not stand in for it."""
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    rounded = layers.Lambda(lambda t: tf.cast(tf.cast(t, tf.int32), t.dtype))
    model = keras.Model(
        [a, b], layers.Dense(2)(layers.Concatenate()([rounded(a), b]))
    )
    x = [np.ones((1, 2)), np.ones((1, 2))]
    y = model.predict(x, verbose=0).argmax(1)
    with pytest.raises(ValueError, match="no gradient"):
        keras_rub.attacks.PGD(model, perturb="a")(x, y, 0.1)
    for defense in ("ARUBModel", "BaselineModel", "PGDModel"):
        robust = getattr(keras_rub, defense)(model, 0.1, perturb="a")
        robust.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match="no gradient"):
            robust.fit(x, y, verbose=0)


def test_masks_of_keras_are_not_lost_in_silence():
    a = keras.Input((2, 3), name="a")
    b = keras.Input((2,), dtype="int32", name="b")
    words = layers.Embedding(5, 3, mask_zero=True)(b)
    h = layers.GlobalAveragePooling1D()(layers.Add()([a, words]))
    model = keras.Model([a, b], layers.Dense(2)(h))
    x = [np.ones((1, 2, 3)), np.ones((1, 2), int)]
    with pytest.raises(ValueError, match="mask.*Received: a tensor of"):
        keras_rub.certify(model, x, rho=0.1)


def test_a_subclassed_model_is_told_what_to_do():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = layers.Dense(2)

        def call(self, inputs):
            return self.last(inputs[0] + inputs[1])

    model, x = Two(), [np.ones((1, 2), "float32")] * 2
    model(x)
    with pytest.raises(ValueError, match="input shape.*must take one tensor"):
        keras_rub.attacks.PGD(model)(x, [0], 0.1)
    robust = keras_rub.ARUBModel(model, 0.1)
    robust.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="need a functional model"):
        robust.fit(x, np.zeros(1), verbose=0)


def test_an_input_that_does_not_count():
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    try:
        model = keras.Model([a, b], layers.Dense(2)(a))
    except ValueError:
        pytest.skip(f"Keras {keras.__version__} refuses such a model itself")
    x = [np.ones((1, 2)), np.ones((1, 2))]
    assert keras_rub.certify(model, x, rho=0.1, perturb="a", verbose=0)
    with pytest.raises(ValueError, match="does not depend.*'b'"):
        keras_rub.certify(model, x, rho=0.1, perturb="b")
