"""Classifiers that end in softmax, log_softmax or sigmoid, or in one output."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub
from keras_rub import attacks, classifier
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.bounds.problem import Problem
from keras_rub.defenses.losses import on_logits
from tests.calling import call

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 5)).astype("float32")
Y = np.argmax(X @ RNG.normal(size=(5, 3)), axis=1)
TWO = (X[:, 0] > X[:, 1]).astype(int)

# Without the random choices, which two graphs make in different order.
DEFENCES = {
    "rub": (keras_rub.RUBModel, {"competitors": "all"}),
    "arub": (keras_rub.ARUBModel, {"competitors": "all"}),
    "pgd": (keras_rub.PGDModel, {"random_start": False, "steps": 3}),
    "fgsm": (keras_rub.FGSMModel, {"random_start": False}),
    "baseline": (keras_rub.BaselineModel, {}),
    "coap": (keras_rub.COAPModel, {}),
    "ibp": (keras_rub.IBPModel, {}),
}
EACH = pytest.mark.parametrize("defence", DEFENCES)


def net(activation=None, outputs=3):
    return keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(6, activation="relu"),
            layers.Dense(outputs, activation=activation),
        ]
    )


def wrapped(defence, base, loss, rho=0.1, **settings):
    wrap, options = DEFENCES[defence]
    model = wrap(base, rho, mix=0.7, **options)
    # A few steps are faster than tracing one.
    settings = {"run_eagerly": True, **settings}
    model.compile(keras.optimizers.Adam(0.01), loss, **settings)
    return model


def logits_by_hand(base, x):
    """The outputs before the activation of the last layer of `net`."""
    w1, b1, w2, b2 = map(np.asarray, base.weights)
    return np.maximum(x @ w1 + b1, 0.0) @ w2 + b2


def cross_entropy(logits, labels):
    """The mean cross entropy of logits [n, K], in float64."""
    logits = np.asarray(logits, "float64")
    highest = logits.max(axis=1)
    log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return (log_sum - logits[np.arange(len(labels)), labels]).mean()


def both_logits(raw):
    return np.concatenate([np.zeros_like(raw), raw], axis=1)


# The softmax twin -------------------------------------------------------------


@pytest.fixture(scope="module")
def twins():
    """A network that returns logits and one that returns probabilities."""
    keras.utils.set_random_seed(1)
    return net(), net("softmax")


@pytest.mark.eager
@EACH
def test_softmax_twin_trains_to_the_same_weights(twins, defence):
    keras.utils.set_random_seed(2)
    start = net().get_weights()
    models = []
    for base in twins:
        base.set_weights(start)
        models.append(
            wrapped(
                defence,
                base,
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
            )
        )
    for step in range(4):
        some = slice(6 * step, 6 * step + 6)
        logs = [
            model.train_on_batch(X[some], Y[some], return_dict=True)
            for model in models
        ]
        for name in logs[0]:
            assert logs[0][name] == pytest.approx(logs[1][name], abs=1e-5)
        for a, b in zip(*(m.get_weights() for m in models), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(models[0].get_weights()[0] - start[0]).max() > 1e-3
    # Both get the same certificates.
    first, second = (
        keras_rub.certify(model, X, Y, rho=0.1, norm="inf", method="crown")
        for model in models
    )
    np.testing.assert_array_equal(first.certified, second.certified)
    np.testing.assert_array_equal(first.predicted, second.predicted)
    np.testing.assert_allclose(first.margins, second.margins, atol=1e-5)
    # The user's own outputs.
    logits, probabilities = (model.predict(X, verbose=0) for model in models)
    np.testing.assert_allclose(
        probabilities, keras.ops.softmax(logits), atol=1e-6
    )
    np.testing.assert_array_equal(models[1](X), twins[1](X))


def test_softmax_twin_gets_the_same_bounds_and_attacks(twins):
    twins[1].set_weights(twins[0].get_weights())
    first, second = (
        keras_rub.certify(base, X, Y, rho=0.1, method="rub") for base in twins
    )
    np.testing.assert_array_equal(first.certified, second.certified)
    np.testing.assert_array_equal(first.margins, second.margins)
    found = [
        attacks.make("pgd", base, norm="inf", steps=5)(X, Y, 0.3)
        for base in twins
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


# The sigmoid twin -------------------------------------------------------------


@pytest.fixture(scope="module")
def binary():
    """One sigmoid, and the two logits [0, z] that it stands for."""
    keras.utils.set_random_seed(3)
    one, two = net("sigmoid", 1), net(None, 2)
    one.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
    one.fit(X, TWO, epochs=20, verbose=0)
    w1, b1, w2, b2 = one.get_weights()
    two.set_weights([w1, b1, both_logits(w2), np.append([0.0], b2)])
    return one, two


@pytest.mark.eager
@pytest.mark.parametrize(
    ("norm", "method"),
    [(1, "rub"), (2, "crown"), ("inf", "coap")],
)
def test_sigmoid_twin_gets_the_same_certificates(binary, norm, method):
    settings = {"norm": norm, "method": method, "verbose": 0}
    first, second = (
        keras_rub.certify(base, X, TWO, rho=0.1, **settings) for base in binary
    )
    assert 0 < first.certified.sum() < len(X)
    np.testing.assert_array_equal(first.certified, second.certified)
    np.testing.assert_array_equal(first.predicted, second.predicted)
    np.testing.assert_allclose(first.margins, second.margins, atol=1e-6)
    if norm == 2:
        radii = [
            keras_rub.certified_radius(base, X[:6], TWO[:6, None], **settings)
            for base in binary
        ]
        np.testing.assert_allclose(*radii, rtol=1e-3)


@pytest.mark.parametrize("defence", ["rub", "arub", "fgsm"])
def test_sigmoid_trains_on_its_logit(defence):
    keras.utils.set_random_seed(4)
    bases = net("sigmoid", 1), net(None, 1)
    bases[1].set_weights(bases[0].get_weights())
    losses = (
        "binary_crossentropy",
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    models = [
        wrapped(
            defence,
            base,
            loss,
            metrics=["accuracy"],
            weighted_metrics=["binary_accuracy"],
        )
        for base, loss in zip(bases, losses, strict=True)
    ]
    z = logits_by_hand(bases[0], X)
    logs = [
        model.train_on_batch(X, TWO[:, None], return_dict=True)
        for model in models
    ]
    for found in logs:
        assert found["accuracy"] == pytest.approx(
            np.mean((z[:, 0] > 0) == TWO), abs=1e-6
        )
        assert found["binary_accuracy"] == found["accuracy"]
        assert found["clean_loss"] == pytest.approx(
            cross_entropy(both_logits(z), TWO), rel=1e-5
        )
        assert found["loss"] > found["clean_loss"]
    for a, b in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    chances = models[0].predict(X, verbose=0)
    assert chances.shape == (len(X), 1)
    np.testing.assert_allclose(
        chances,
        keras.ops.sigmoid(models[1].predict(X, verbose=0)),
        atol=1e-6,
    )


@pytest.mark.eager
def test_one_output_everywhere(binary, tmp_path, capsys):
    base = keras.models.clone_model(binary[0])
    base.set_weights(binary[0].get_weights())
    model = keras_rub.COAPModel(base, 0.05)
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=[
            "accuracy",
            keras.metrics.BinaryAccuracy(),
            keras.metrics.AUC(name="auc"),
            keras_rub.metrics.CertifiedAccuracy(0.05),
        ],
    )
    look = keras_rub.callbacks.Certify(X, TWO, 0.05)
    data = tf.data.Dataset.from_tensor_slices((X, TWO)).batch(10)
    logs = model.fit(data, verbose=0, callbacks=[look]).history
    assert {"accuracy", "binary_accuracy", "auc"} < set(logs)
    found = model.evaluate(data, verbose=0, return_dict=True)
    certificate = keras_rub.certify(model, data, rho=0.05, method="crown")
    assert found["accuracy"] == found["binary_accuracy"]
    assert found["accuracy"] == pytest.approx(certificate.clean_accuracy)
    assert found["certified_0.05"] == pytest.approx(
        certificate.certified_accuracy
    )
    assert logs["certified_0.05"][-1] == certificate.certified_accuracy
    margins = model.worst_case_margins(X, TWO)
    assert margins.shape == (len(X), 2)
    assert not np.any(np.take_along_axis(margins.numpy(), TWO[:, None], 1))
    # Attacks and the evaluation, also from a data set.
    result = keras_rub.evaluate(
        model, data, radii=[0.1], attacks=["foolbox-pgd", "pgd"], verbose=0
    )
    assert result.clean_accuracy == certificate.clean_accuracy
    assert result.rows[0]["certified"] <= result.rows[0]["worst"]
    assert result.rows[0]["worst"] < result.rows[0]["clean"]
    assert not result.warnings
    # Saving, and serving.
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = loaded.evaluate(data, verbose=0, return_dict=True)
    assert again == pytest.approx(found)
    assert loaded.get_compile_config()["loss"] == "binary_crossentropy"
    folder = keras_rub.export(model, tmp_path / "served")
    served = tf.saved_model.load(folder)
    answer = served.signatures["serving_default"](x=tf.constant(X))
    chances = model.predict(X, verbose=0)
    np.testing.assert_allclose(
        answer["probabilities"],
        np.concatenate([1 - chances, chances], axis=1),
        atol=1e-6,
    )
    np.testing.assert_array_equal(answer["class"], certificate.predicted)
    proof = served.signatures["certify"](
        x=tf.constant(X), rho=tf.fill([len(X)], 0.05)
    )
    own = certificate.certified | (certificate.predicted != TWO)
    assert np.all(proof["certified"].numpy() <= own)
    assert keras_rub.serving.read_metadata(folder)["num_classes"] == 2
    # A command, on a data set of two classes.
    table = np.column_stack([np.repeat(X, 3, 0), np.repeat(TWO, 3)])
    np.savetxt(tmp_path / "two.csv", table, "%g", ",", header="a,b,c,d,e,y")
    printed = call(
        capsys,
        "certify",
        model=tmp_path / "model.keras",
        out=tmp_path / "out",
        dataset=tmp_path / "two.csv",
        normalization="none",
        radii=0.05,
        method="crown",
    )
    assert "%" in printed


# Every way to write a head ----------------------------------------------------


def functional(head):
    x = keras.Input((5,), name="features")
    h = layers.Dense(6, activation="relu")(x)
    return keras.Model({"features": x}, head(layers.Dense(3)(h)))


def nested(activation):
    x = keras.Input((5,))
    inner = keras.Sequential([net(activation)], name="inner")
    return keras.Model(x, inner(x * 1.0))


def one_pixel(activation):
    return keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(6, activation="relu"),
            layers.Reshape((1, 1, 6)),
            layers.Conv2D(3, 1, activation=activation),
            layers.Flatten(),
        ]
    )


WAYS = {
    "dense": (lambda: net("softmax"), "softmax"),
    "dense, log": (lambda: net("log_softmax"), "log_softmax"),
    "dense, sigmoid": (lambda: net("sigmoid"), "sigmoid"),
    "TensorFlow's own": (lambda: net(tf.nn.softmax), "softmax"),
    "a layer as activation": (lambda: net(layers.Softmax()), "softmax"),
    "a softmax layer": (lambda: functional(layers.Softmax()), "softmax"),
    "an activation layer": (
        lambda: functional(layers.Activation("sigmoid")),
        "sigmoid",
    ),
    "an operation": (lambda: functional(keras.ops.log_softmax), "log_softmax"),
    "nothing behind it": (
        lambda: keras.Sequential([net("softmax"), layers.Activation("linear")]),
        "softmax",
    ),
    "nested twice": (lambda: nested("softmax"), "softmax"),
    "a convolution": (lambda: one_pixel("softmax"), "softmax"),
    "none": (lambda: net(), None),
    "none, nested": (lambda: nested(None), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_head(way):
    make, head = WAYS[way]
    base = make()
    found = classifier.Classifier.of(base)
    assert classifier.head_of(base) == found.head == head
    assert classifier.Classifier.of(base) is found
    # Far out probabilities are 0 and 1, and the logits are still exact.
    hidden, *_, last = (v for v in base.variables if v.path.endswith("kernel"))
    last.assign(1000.0 * last)
    flat = np.reshape(last, [6, 3])
    expected = np.maximum(X @ np.asarray(hidden), 0.0) @ flat
    logits = classifier.logits_of(base, tf.constant(X))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(
        found.outputs(logits), classifier.outputs_of(base, X), atol=1e-6
    )
    # The bounds see the same numbers.
    problem = Problem.of(base, keras_rub.PerturbationSet(1))
    np.testing.assert_allclose(
        problem.logits(tf.constant(X)), logits, rtol=1e-5, atol=1e-2
    )


def test_reading_a_head_leaves_the_model_alone(tmp_path):
    base = nested("softmax")
    before = base.get_config()
    expected = base.predict(X, verbose=0)
    keras_rub.ARUBModel(base)
    assert base.get_config() == before
    base.save(tmp_path / "base.keras")
    loaded = keras.models.load_model(tmp_path / "base.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected)
    assert len(loaded.weights) == len(base.weights) == 4


def test_head_of_a_model_that_is_built_by_fit():
    base = keras.Sequential(
        [layers.Dense(6, "relu"), layers.Dense(1, activation="sigmoid")]
    )
    model = keras_rub.BaselineModel(base, 0.1)
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    assert model.width == 1
    logs = model.fit(X, TWO, batch_size=24, verbose=0).history
    assert model.num_classes == 2
    assert model.predict(X, verbose=0).shape == (len(X), 1)
    assert logs["loss"][0] > logs["clean_loss"][0]
    late = keras_rub.ARUBModel(
        keras.Sequential([layers.Dense(3), layers.Flatten()])
    )
    late.compile("sgd", "binary_crossentropy")  # could be one output
    with pytest.raises(ValueError, match="differences of logits"):
        late.fit(X, keras.utils.to_categorical(Y), verbose=0)


def test_compiled_base_with_a_softmax():
    base = net("softmax")
    base.compile(
        "adam",
        keras.losses.CategoricalCrossentropy(),
        metrics=["accuracy", "top_k_categorical_accuracy"],
        run_eagerly=True,
    )
    model = keras_rub.BaselineModel(base, 0.0)
    one_hot = keras.utils.to_categorical(Y)
    own = base.evaluate(X, one_hot, verbose=0, return_dict=True)
    found = model.evaluate(X, one_hot, verbose=0, return_dict=True)
    assert found["clean_loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert found["accuracy"] == own["accuracy"]


# Losses -----------------------------------------------------------------------

ONE_HOT = np.eye(3, dtype="float32")[Y]


@pytest.mark.parametrize(
    ("loss", "head", "labels"),
    [
        ("sparse_categorical_crossentropy", "softmax", Y),
        ("SparseCategoricalCrossentropy", "softmax", Y),
        (keras.losses.SparseCategoricalCrossentropy(), "softmax", Y),
        (keras.losses.sparse_categorical_crossentropy, "softmax", Y),
        ("categorical_crossentropy", "softmax", ONE_HOT),
        (keras.losses.CategoricalCrossentropy(), "softmax", ONE_HOT),
        ("sparse_categorical_crossentropy", "log_softmax", Y),
        (
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "log_softmax",
            Y,
        ),
        ("sparse_categorical_crossentropy", None, Y),
    ],
)
def test_cross_entropy_is_taken_on_the_logits(loss, head, labels):
    # Probabilities are 0 in float32 here, and Keras's own loss is cut at 16.
    logits = (200.0 * RNG.normal(size=(24, 3))).astype("float32")
    found = keras.losses.get(on_logits(loss, head, 3, True))(labels, logits)
    expected = cross_entropy(logits, Y)
    assert expected > 100
    assert float(keras.ops.mean(found)) == pytest.approx(expected, rel=1e-5)


def test_settings_of_a_loss_stay():
    loss = keras.losses.BinaryCrossentropy(label_smoothing=0.2, reduction="sum")
    z = np.linspace(-3.0, 3.0, 24, dtype="float32")[:, None]
    found = on_logits(loss, "sigmoid", 1, True)(TWO[:, None], z)
    expected = loss(TWO[:, None], keras.ops.sigmoid(z))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    "loss", ["mse", keras.losses.MeanSquaredError(reduction="sum")]
)
def test_other_losses_read_the_outputs(loss):
    logits = RNG.normal(size=(24, 3)).astype("float32")
    found = on_logits(loss, "softmax", 3, True)
    weights = np.linspace(0.0, 1.0, 24)
    function = keras.losses.get(loss)
    args = [ONE_HOT, keras.ops.softmax(logits)]
    np.testing.assert_allclose(
        found(ONE_HOT, logits), function(*args), rtol=1e-5
    )
    if not isinstance(loss, str):
        assert float(
            found(ONE_HOT, logits, sample_weight=weights)
        ) == pytest.approx(float(function(*args, sample_weight=weights)))
    # It does not grow with each margin, so that no bound can be taken of it.
    with pytest.raises(ValueError, match="differences of logits"):
        keras_rub.ARUBModel(net("softmax")).compile("sgd", loss)


def log_likelihood(y_true, y_pred):
    """The usual loss of log-probabilities, written by a user."""
    labels = keras.ops.cast(keras.ops.reshape(y_true, [-1]), "int32")
    return -keras.ops.sum(y_pred * keras.ops.one_hot(labels, 3), axis=-1)


def test_a_loss_of_ones_own_behind_log_softmax():
    base = net("log_softmax")
    model = wrapped("arub", base, log_likelihood)
    found = model.test_on_batch(X, Y, return_dict=True)
    assert found["clean_loss"] == pytest.approx(
        cross_entropy(logits_by_hand(base, X), Y), rel=1e-5
    )


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.BinaryCrossentropy(label_smoothing=0.1),
        keras.losses.BinaryCrossentropy(label_smoothing=0.01),
        lambda y, p: keras.ops.mean(p, axis=-1),
    ],
)
def test_one_output_needs_a_loss_that_grows_away_from_the_label(loss):
    with pytest.raises(ValueError, match="BinaryCrossentropy, without label"):
        keras_rub.RUBModel(net("sigmoid", 1)).compile("sgd", loss)


def test_one_output_has_the_classes_0_and_1():
    model = wrapped("arub", net("sigmoid", 1), "binary_crossentropy")
    with pytest.raises(ValueError, match="class numbers from 0 to 1"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="because `base` has one output"):
        model.train_on_batch(X, keras.utils.to_categorical(TWO))


# Traps ------------------------------------------------------------------------


@pytest.mark.parametrize("defence", ["arub", "baseline", "pgd"])
def test_input_without_a_gradient(defence):
    base = keras.Sequential(
        [
            layers.Input((5,)),
            layers.Embedding(10, 2),
            layers.Flatten(),
            layers.Dense(6),
        ]
    )
    model = wrapped(defence, base, "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="no gradient .* embedding"):
        model.fit(np.abs(X).astype(int), Y, verbose=0)


def test_a_missing_second_derivative_is_named():
    base = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(2, "softsign")]
    )
    base.add(keras.layers.Dense(2))
    model = keras_rub.ARUBModel(base, 0.1)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="second derivatives.*SoftsignGrad"):
        model.fit(np.ones((1, 2)), np.zeros(1), verbose=0)


def test_reduced_precision_is_said_once():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        base = net("softmax")
    finally:
        keras.config.set_dtype_policy(before)
    with pytest.warns(
        UserWarning, match="computes in float16.*predict"
    ) as seen:
        certificate = keras_rub.certify(base, X, rho=0.01, method="rub")
        keras_rub.certify(base, X, rho=0.02, method="rub")
    assert len([w for w in seen if "float16" in str(w.message)]) == 1
    assert certificate.certified.any()


def test_columns_that_hardly_vary(recwarn):
    x = X.copy()
    x[:, 1] = 3.0
    x[:, 4] = 1.0 + 1e-5 * x[:, 4]
    scale = layers.Normalization()
    scale.adapt(x)
    base = keras.Sequential([layers.Input((5,)), scale, layers.Dense(3)])
    model = wrapped("baseline", base, "sparse_categorical_crossentropy")
    with pytest.warns(UserWarning, match=r"columns \[1, 4\].*`mask`"):
        model.fit(x, Y, verbose=0)
    with pytest.warns(UserWarning, match=r"columns \[1, 4\].*`mask`"):
        compiled_bounds(base, keras_rub.PerturbationSet("inf"))
    recwarn.clear()
    fixed = [True, False, True, True, False]
    weights = 1 / np.sqrt(np.asarray(scale.variance).ravel() + 1e-12)
    for attacker in ({"mask": fixed}, {"weights": weights}):
        compiled_bounds(base, keras_rub.PerturbationSet("inf", **attacker))
    assert not [w for w in recwarn if "Normalization" in str(w.message)]


def test_data_sets_in_evaluate(twins):
    settings = {"radii": [0.1], "norms": [1], "attacks": ["pgd"], "verbose": 0}
    settings |= {"certificates": False, "diagnosis": False}
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
    first = keras_rub.evaluate(twins[0], data, **settings)
    second = keras_rub.evaluate(twins[0], X, Y, **settings)
    assert first.rows == second.rows
    with pytest.raises(ValueError, match="holds its own labels"):
        keras_rub.evaluate(twins[0], data, Y, **settings)
    with pytest.raises(ValueError, match=r"batches `\(x, y\)`"):
        keras_rub.evaluate(twins[0], data.map(lambda x, y: x), **settings)
    with pytest.raises(ValueError, match="`y` must hold the true classes"):
        keras_rub.evaluate(twins[0], X, **settings)
