"""The defences behave as ordinary Keras models."""

import json
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_rub import (
    ARUBModel,
    BaselineModel,
    COAPModel,
    FGSMModel,
    IBPModel,
    PGDModel,
    RUBModel,
    UnsupportedLayerError,
)
from keras_rub.callbacks import RhoSchedule
from keras_rub.defenses.robust_model import MarginModel

CROSS_ENTROPY = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("tests")
class SteadyRUBModel(RUBModel):
    """RUB that draws no competitors, so that losses can be compared."""

    def __init__(self, base, rho=0.1, *, competitors="all", **kwargs):
        super().__init__(base, rho, competitors=competitors, **kwargs)


@keras.saving.register_keras_serializable("tests")
class SteadyARUBModel(ARUBModel):
    """The same for aRUB."""

    def __init__(self, base, rho=0.1, *, competitors="all", **kwargs):
        super().__init__(base, rho, competitors=competitors, **kwargs)


@keras.saving.register_keras_serializable("test_robust_model")
class SteadyPGDModel(PGDModel):
    """PGD without a random start, so that its loss can be foretold."""

    def __init__(self, base, rho=0.1, *, random_start=False, **kwargs):
        super().__init__(base, rho, random_start=random_start, **kwargs)


@keras.saving.register_keras_serializable("test_robust_model")
class SteadyFGSMModel(FGSMModel):
    """FGSM without a random start."""

    def __init__(self, base, rho=0.1, *, random_start=False, **kwargs):
        super().__init__(base, rho, random_start=random_start, **kwargs)


@pytest.fixture(
    scope="module",
    params=[
        SteadyRUBModel,
        SteadyARUBModel,
        BaselineModel,
        SteadyPGDModel,
        # PGD with one step: what it has of its own is tested with the attacks.
        pytest.param(SteadyFGSMModel, marks=pytest.mark.slow),
        COAPModel,
        IBPModel,
    ],
    ids=["rub", "arub", "baseline", "pgd", "fgsm", "coap", "ibp"],
)
def wrap(request):
    """The class under test."""
    return request.param


@pytest.fixture
def data(rng):
    """Inputs [40, 6] and the class numbers [40] that a linear map gives."""
    x = rng.normal(size=(40, 6)).astype("float32")
    return x, np.argmax(x @ rng.normal(size=(6, 3)), axis=1)


def mlp(**kwargs):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", **kwargs),
            layers.Dense(3),
        ]
    )


def functional():
    x = keras.Input((6,))
    h = layers.Dense(8, activation="relu")(x)
    h = layers.Concatenate()([h, x])
    return keras.Model(x, layers.Dense(3)(h))


def named_input():
    x = keras.Input((6,), name="features")
    h = layers.Dense(8, activation="relu")(x)
    return keras.Model({"features": x}, layers.Dense(3)(h))


def unbuilt():
    return keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])


def conv_net():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(2, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


@keras.saving.register_keras_serializable("test_robust_model")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="relu")
        self.logits = layers.Dense(3)

    def call(self, inputs):
        return self.logits(self.hidden(inputs))


class Untraceable(Subclassed):
    def call(self, inputs):
        return self.logits(tf.nn.relu(self.hidden(inputs)))


def logit_loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )


def share_of_class_0(y_true, y_pred):
    return keras.ops.cast(keras.ops.argmax(y_pred, -1) == 0, "float32")


def compiled(wrap, base=None, rho=0.1, optimizer=None, mix=1.0, **kwargs):
    model = wrap(base or mlp(), rho=rho, mix=mix)
    kwargs.setdefault("loss", CROSS_ENTROPY)
    model.compile(optimizer or keras.optimizers.SGD(0.1), **kwargs)
    if model.built:
        # TensorFlow traces a step twice that creates variables.
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture(scope="module")
def traced(wrap):
    """A model and its weights; tracing it once keeps this file fast."""
    keras.utils.set_random_seed(0)
    model = compiled(wrap, functional(), metrics=["accuracy"])
    return model, model.get_weights()


@pytest.fixture
def model(traced):
    """A compiled Functional model, the same at the start of every test."""
    model, weights = traced
    model.set_weights(weights)
    model.rho, model.mix = 0.1, 1.0
    model.optimizer.learning_rate = 0.1
    return model


@pytest.fixture
def still(model):
    """A model that `fit` does not change, so that its logs are known."""
    model.optimizer.learning_rate = 0.0
    return model


def fit(model, *args, **kwargs):
    """The logs of a fit in one batch, without shuffling."""
    kwargs = {"verbose": 0, "shuffle": False, "batch_size": 64, **kwargs}
    return model.fit(*args, **kwargs).history


def fit_from(model, start, *args, **kwargs):
    """The weights that a fit from the weights `start` arrives at."""
    model.set_weights(start)
    fit(model, *args, **kwargs)
    return model.get_weights()


def evaluate(model, *args, **kwargs):
    return model.evaluate(*args, verbose=0, return_dict=True, **kwargs)


def mean_loss(outputs, y):
    """The cross entropy of logits or margins [n, K], in numpy."""
    outputs = np.asarray(outputs, "float64")
    log_sum = np.log(np.exp(outputs).sum(axis=1))
    return (log_sum - outputs[np.arange(len(y)), y]).mean()


def robust_loss(model, x, y, rho=None):
    """What the model minimises, from its parts."""
    if isinstance(model, MarginModel):
        return mean_loss(model.worst_case_margins(x, y, rho), y)
    features = tf.constant(keras.tree.flatten(x)[0])
    labels = tf.constant(y, tf.int32)
    rho = tf.constant(model.rho if rho is None else rho, tf.float32)
    if not isinstance(model, BaselineModel):
        points = model.search(features, labels, rho)
        return mean_loss(model.logits_of(points), y)
    with tf.GradientTape() as tape:
        tape.watch(features)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, model.logits_of(features)
        )
    gradient = tf.reshape(tape.gradient(losses, features), [len(y), -1])
    steepness = tf.reduce_sum(tf.abs(gradient), axis=1)
    return float(tf.reduce_mean(losses + rho * steepness))


def robust_losses(model, x, y, rhos):
    """The loss at each radius."""
    return [robust_loss(model, x, y, rho) for rho in rhos]


def assert_same(left, right, tolerance=1e-6):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Any base model -------------------------------------------------------------


@pytest.mark.eager
@pytest.mark.parametrize("make", [named_input, conv_net])
def test_named_inputs_and_images(wrap, make, data, rng):
    x, y = data
    if make is named_input:
        x = {"features": x}
    else:
        x = rng.normal(size=(40, 8, 8, 1)).astype("float32")
    base = make()
    model = compiled(wrap, base)
    expected = robust_loss(model, x, y)
    first, second = fit(model, x, y, epochs=2)["loss"]
    assert first == pytest.approx(expected, rel=1e-5)
    assert second < first
    np.testing.assert_allclose(model(x), base(x), atol=1e-6)


@pytest.mark.eager
@pytest.mark.parametrize("make", [unbuilt, Subclassed])
def test_base_without_an_input_layer(wrap, make, data, tmp_path):
    x, y = data
    model = compiled(wrap, make())
    first, second = fit(model, x, y, epochs=2)["loss"]
    assert second < first
    np.testing.assert_allclose(model(x), model.base(x), atol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert evaluate(loaded, x, y)["loss"] == pytest.approx(
        robust_loss(model, x, y), rel=1e-5
    )


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("bounded", [RUBModel, COAPModel, IBPModel])
def test_bound_of_a_subclassed_base_says_what_to_use(bounded, called, data):
    x, y = data
    base = Untraceable()
    if called:
        base(x)
    model = compiled(bounded, base)
    with pytest.raises(
        UnsupportedLayerError, match="Keras layers.*tf.nn.relu.*ARUBModel"
    ):
        fit(model, x, y)


@pytest.mark.eager
def test_compiled_base_needs_no_compile(wrap, data):
    x, y = data
    base = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    base.compile(keras.optimizers.SGD(0.05), loss)
    model = wrap(base)
    first, second = fit(model, x, y, epochs=2)["loss"]
    assert second < first
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    assert model.optimizer is not base.optimizer
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    # The base is still a model of its own.
    clean = mean_loss(base(x), y)
    assert fit(base, x, y)["loss"] == pytest.approx([clean], rel=1e-5)


@pytest.mark.eager
def test_compiled_base_with_functions_of_the_user(wrap, data):
    x, y = data
    base = mlp()
    base.compile(
        "sgd",
        logit_loss,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        weighted_metrics=[share_of_class_0],
    )
    predicted = np.argmax(base(x), axis=1)
    # The two models count apart, also when they are used in turns.
    use_base = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: evaluate(base, x[:1], y[:1])
    )
    logs = evaluate(wrap(base), x, y, batch_size=20, callbacks=[use_base])
    assert logs["clean_loss"] == pytest.approx(mean_loss(base(x), y), rel=1e-5)
    assert logs["accuracy"] == pytest.approx(np.mean(predicted == y))
    assert logs["share_of_class_0"] == pytest.approx(np.mean(predicted == 0))


# Losses, metrics and weights ------------------------------------------------


@pytest.mark.eager
def test_one_hot_labels(wrap, data):
    x, y = data
    model = compiled(wrap, loss="categorical_crossentropy")
    logs = evaluate(model, x, keras.utils.to_categorical(y, 3))
    assert logs == pytest.approx(
        {
            "loss": robust_loss(model, x, y),
            "clean_loss": mean_loss(model(x), y),
            "rho": 0.1,
        },
        rel=1e-5,
    )


@pytest.mark.eager
def test_a_loss_function_and_metrics_in_every_form(wrap, data):
    x, y = data
    top_2 = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top_2")
    metrics = ["accuracy", top_2, share_of_class_0]
    model = compiled(wrap, loss=logit_loss, metrics=metrics)
    order = np.argsort(-np.asarray(model(x)), axis=1)
    assert evaluate(model, x, y) == pytest.approx(
        {
            "loss": robust_loss(model, x, y),
            "clean_loss": mean_loss(model(x), y),
            "accuracy": np.mean(order[:, 0] == y),
            "top_2": np.mean(order[:, 2] != y),
            "share_of_class_0": np.mean(order[:, 0] == 0),
            "rho": 0.1,
        },
        rel=1e-5,
    )


@pytest.mark.eager
def test_sample_weight_and_class_weight(model, data):
    x, y = data
    start = model.get_weights()
    # Keras divides by the number of samples: 2 and 0 are half of them.
    half = np.repeat([2.0, 0.0], 20)
    only_half = fit_from(model, start, x[:20], y[:20])
    assert_same(fit_from(model, start, x, y, sample_weight=half), only_half)
    by_class = {0: 1.0, 1: 3.0, 2: 0.5}
    by_sample = np.array([by_class[label] for label in y])
    weighted = fit_from(model, start, x, y, class_weight=by_class)
    assert_same(fit_from(model, start, x, y, sample_weight=by_sample), weighted)
    assert np.abs(weighted[0] - only_half[0]).max() > 1e-4


@pytest.mark.eager
def test_a_loss_object_and_regularization(wrap, data):
    x, y = data
    base = mlp(kernel_regularizer=keras.regularizers.L2(0.1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(wrap, base, loss=loss)
    penalty = 0.1 * np.sum(base.get_weights()[0] ** 2)
    assert penalty > 0.1
    assert evaluate(model, x, y) == pytest.approx(
        {
            "loss": robust_loss(model, x, y) + penalty,
            "clean_loss": mean_loss(base(x), y) + penalty,
            "rho": 0.1,
        },
        rel=1e-5,
    )


# Data -----------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(16 * index, 16 * (index + 1))
        return self.x[rows], self.y[rows]


def test_data_in_every_form(still, data):
    x, y = data
    # 40 samples in batches of 16, 16 and 8: each sample counts the same.
    expected = pytest.approx([robust_loss(still, x, y)], rel=1e-5)
    last_half = pytest.approx([robust_loss(still, x[20:], y[20:])], rel=1e-5)
    batches = Batches(x, y)

    def generator():
        while True:
            for index in range(3):
                yield batches[index]

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    logs = fit(still, x, y, batch_size=16, validation_data=(x[20:], y[20:]))
    assert logs["loss"] == expected
    assert logs["val_loss"] == last_half
    logs = fit(still, dataset, batch_size=None, validation_data=dataset)
    assert logs["loss"] == expected
    assert logs["val_loss"] == expected
    assert fit(still, batches, batch_size=None)["loss"] == expected
    logs = fit(still, generator(), batch_size=None, steps_per_epoch=3)
    assert logs["loss"] == expected
    logs = fit(still, x, y, batch_size=16, validation_split=0.5)
    assert logs["val_loss"] == last_half
    assert [evaluate(still, dataset)["loss"]] == expected


def test_whole_number_inputs(model, rng):
    x = rng.integers(0, 4, (32, 6)).astype("uint8")
    y = rng.integers(0, 3, 32)
    start = model.get_weights()
    floats = fit(model, x.astype("float32"), y, batch_size=16, epochs=2)
    model.set_weights(start)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    whole = fit(model, dataset, batch_size=None, epochs=2)
    assert whole["loss"] == pytest.approx(floats["loss"], rel=1e-5)
    assert whole["clean_loss"] == pytest.approx(floats["clean_loss"], rel=1e-5)
    assert floats["loss"][0] > floats["clean_loss"][0] + 0.01


# How `fit` runs -------------------------------------------------------------


def test_graph_eager_and_several_steps_agree(wrap, model, data):
    x, y = data
    start = model.get_weights()
    graph = fit_from(model, start, x, y, batch_size=20)
    assert np.abs(graph[0] - start[0]).max() > 1e-3
    for how in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        other = compiled(wrap, functional(), **how)
        weights = fit_from(other, start, x, y, batch_size=20)
        assert_same(weights, graph, 1e-5)


def test_xla_is_not_chosen_on_a_gpu(wrap, monkeypatch):
    # It would drop the checks of the inputs, and can't compile every search.
    gpu = tf.config.PhysicalDevice("GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
    plain, model = mlp(), compiled(wrap)
    plain.compile("sgd", "mse")
    assert plain.jit_compile and not model.jit_compile


@pytest.mark.eager
def test_gradient_clipping_and_frozen_layers(wrap, data):
    x, y = data
    base = mlp()
    base.layers[0].trainable = False
    model = compiled(
        wrap, base, optimizer=keras.optimizers.SGD(1.0, clipnorm=1e-3)
    )
    start = model.get_weights()
    end = fit_from(model, start, x, y)
    moved = [np.linalg.norm(a - b) for a, b in zip(start, end, strict=True)]
    assert moved == pytest.approx([0.0, 0.0, 1e-3, 1e-3], rel=1e-3)


@pytest.mark.eager
def test_mixed_precision(wrap, data):
    x, y = data
    keras.config.set_dtype_policy("mixed_float16")
    try:
        base = mlp()
    finally:
        keras.config.set_dtype_policy("float32")
    model = compiled(wrap, base, optimizer=keras.optimizers.Adam(0.05))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    logs = fit(model, x, y, epochs=3)
    assert np.all(np.isfinite(logs["loss"]))
    assert logs["loss"][-1] < logs["loss"][0]
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert model(x).dtype == "float16"


@pytest.mark.eager
def test_batch_normalization_and_dropout(wrap, data):
    x, y = data

    def make(rate):
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8),
                layers.BatchNormalization(momentum=0.5),
                layers.ReLU(),
                layers.Dropout(rate),
                layers.Dense(3),
            ]
        )

    base, plain = make(0.5), make(0.0)
    plain.set_weights(base.get_weights())
    model = compiled(wrap, base, optimizer=keras.optimizers.SGD(0.0))
    before = robust_loss(model, x, y)
    np.testing.assert_allclose(
        robust_loss(wrap(plain), x, y), before, atol=1e-6
    )
    at_inference = evaluate(model, x, y)
    assert_same(base.get_weights(), plain.get_weights(), 0.0)
    logs = fit(model, x, y)
    # The robust loss is that of inference, the clean one that of training.
    assert logs["loss"] == pytest.approx([at_inference["loss"]], rel=1e-5)
    assert at_inference["loss"] == pytest.approx(before, rel=1e-5)
    assert abs(logs["clean_loss"][0] - at_inference["clean_loss"]) > 1e-3
    # The moving statistics went forward by one pass.
    plain(x, training=True)
    assert_same(base.get_weights(), plain.get_weights())
    assert np.abs(base.layers[1].moving_mean).max() > 0.01


_DISTRIBUTED = """
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from keras_rub import ARUBModel, RUBModel
from keras_rub.callbacks import RhoSchedule
from keras_rub.defenses.robust_model import MarginModel

rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 6)).astype("float32"), rng.integers(0, 3, 32)

def train(wrap, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = wrap(keras.Sequential([keras.Input((6,)),
            keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]), rho=0.2,
            competitors="all")
        model.compile(keras.optimizers.SGD(0.1),
            "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0,
        callbacks=[RhoSchedule(epochs=1)]).history
    return logs, model.get_weights()

for wrap in RUBModel, ARUBModel:
    logs, weights = train(wrap, tf.distribute.get_strategy())
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert two.num_replicas_in_sync == 2
    split_logs, split_weights = train(wrap, two)
    assert set(split_logs) == set(logs)
    np.testing.assert_allclose(logs["rho"], [0.0, 0.2], atol=1e-6)
    for name in logs:
        np.testing.assert_allclose(
            split_logs[name], logs[name], atol=1e-5, err_msg=name)
    for one, split in zip(weights, split_weights):
        np.testing.assert_allclose(split, one, atol=1e-5)
print("both agree")
"""


@pytest.mark.medium
def test_two_devices_agree_with_one():
    done = subprocess.run(
        [sys.executable, "-c", _DISTRIBUTED], capture_output=True, text=True
    )
    assert done.stdout.endswith("both agree\n"), done.stderr[-3000:]


# Logs and callbacks ---------------------------------------------------------


@pytest.mark.eager
def test_logs(still, data):
    x, y = data
    base = still.base
    base.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    plain = evaluate(base, x, y)
    expected = {
        "loss": robust_loss(still, x, y),
        "clean_loss": plain["loss"],
        "accuracy": plain["accuracy"],
        "rho": 0.1,
    }
    assert evaluate(still, x, y) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(
        still.predict(x, verbose=0), base.predict(x, verbose=0), atol=1e-6
    )
    logs = fit(still, x, y, validation_data=(x, y))
    expected.update({f"val_{name}": expected[name] for name in expected})
    assert {name: value[0] for name, value in logs.items()} == pytest.approx(
        expected, rel=1e-5
    )


def test_callbacks_of_keras(model, data, tmp_path):
    x, y = data
    rates = [0.1, 0.0, 0.0, 0.0]
    logs = fit(
        model,
        x,
        y,
        epochs=4,
        validation_data=(x, y),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "best.keras", save_best_only=True
            ),
            keras.callbacks.TensorBoard(tmp_path / "board"),
        ],
    )
    # From the second epoch on nothing improves, so that it is the last.
    assert logs["learning_rate"] == pytest.approx([0.1, 0.0])
    assert logs["val_loss"][0] < logs["loss"][0]
    best = keras.models.load_model(tmp_path / "best.keras")
    assert robust_loss(best, x, y) == pytest.approx(logs["val_loss"][0], 1e-5)
    for part in "train", "validation":
        assert list((tmp_path / "board" / part).glob("events.*"))


@pytest.mark.eager
def test_backup_and_restore(wrap, data, tmp_path):
    x, y = data

    def make():
        return compiled(wrap, optimizer=keras.optimizers.Adam(0.05))

    def run(model, *callbacks, **kwargs):
        kwargs.update(epochs=4, batch_size=64, shuffle=False, verbose=0)
        callbacks = [RhoSchedule(0.1, epochs=3), *callbacks]
        return model.fit(x, y, callbacks=callbacks, **kwargs)

    def interrupt(epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt

    first, second = make(), make()
    with pytest.raises(KeyboardInterrupt):
        run(
            first,
            keras.callbacks.BackupAndRestore(tmp_path),
            keras.callbacks.LambdaCallback(on_epoch_begin=interrupt),
        )
    run(first, initial_epoch=2)
    resumed = run(second, keras.callbacks.BackupAndRestore(tmp_path))
    assert resumed.epoch == [2, 3]
    assert resumed.history["rho"] == pytest.approx([0.2 / 3, 0.1])
    assert_same(second.get_weights(), first.get_weights())


# The radius and the mix weight ----------------------------------------------


def schedule(end, steps):
    """Rises from 0 to `end` in a straight line."""
    return keras.optimizers.schedules.PolynomialDecay(0.0, steps, end)


@pytest.mark.eager
def test_rho_and_mix_can_be_schedules(wrap, data):
    x, y = data
    model = compiled(
        wrap,
        rho=schedule(0.2, 2),
        mix=schedule(0.8, 4),
        optimizer=keras.optimizers.SGD(0.0),
    )
    assert (model.rho, model.mix) == (0.0, 0.0)
    logs = fit(model, x, y, epochs=3)
    assert (model.rho, model.mix) == pytest.approx((0.2, 0.6))
    rhos, mixes = [0.0, 0.1, 0.2], [0.0, 0.2, 0.4]
    clean = mean_loss(model(x), y)
    robust = robust_losses(model, x, y, rhos)
    assert logs["clean_loss"] == pytest.approx([clean] * 3, rel=1e-5)
    assert logs["loss"] == pytest.approx(
        [m * r + (1 - m) * clean for m, r in zip(mixes, robust, strict=True)],
        rel=1e-5,
    )
    # What is logged is what the loss was taken at.
    assert logs["rho"] == pytest.approx(rhos)
    assert logs["mix"] == pytest.approx(mixes)


def test_rho_schedule_callback(still, data):
    x, y = data
    still.rho = 0.4
    ramps = {
        "linear": [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4],
        "smooth": [0.0, 0.0, 0.0625, 0.2, 0.3375, 0.4, 0.4],
    }
    for shape, expected in ramps.items():
        callback = RhoSchedule(epochs=4, shape=shape, wait=1)
        logs = fit(still, x, y, epochs=7, callbacks=[callback])
        assert logs["rho"] == pytest.approx(expected)
        assert logs["loss"] == pytest.approx(
            robust_losses(still, x, y, expected), rel=1e-5
        )
        assert still.rho == pytest.approx(0.4)


@pytest.mark.eager
def test_mix_weights_the_two_losses(still, data):
    x, y = data
    still.rho, still.mix = 0.3, 0.25
    clean, robust = mean_loss(still(x), y), robust_loss(still, x, y)

    def mixed(*mixes):
        return pytest.approx(
            [mix * robust + (1 - mix) * clean for mix in mixes], rel=1e-5
        )

    logs = fit(still, x, y, validation_data=(x, y))
    assert logs["loss"] == mixed(0.25)
    assert logs["val_loss"] == mixed(0.25)
    assert logs["clean_loss"] == mixed(0.0)
    callback = RhoSchedule(1.0, epochs=2, parameter="mix")
    logs = fit(still, x, y, epochs=3, callbacks=[callback])
    assert logs["loss"] == mixed(0.0, 0.5, 1.0)


def test_rho_and_mix_can_be_assigned_at_any_time(wrap, data):
    x, y = data
    traces = []

    def loss(y_true, y_pred):
        traces.append(1)
        return logit_loss(y_true, y_pred)

    model = compiled(wrap, loss=loss)
    zero, low, high = robust_losses(model, x, y, [0.0, 0.1, 0.3])
    assert evaluate(model, x, y)["loss"] == pytest.approx(low, rel=1e-5)
    count = len(traces)
    for rho, expected in (0.0, zero), (0.3, high):
        model.rho = rho
        logs = evaluate(model, x, y)
        assert logs["rho"] == pytest.approx(rho)
        assert logs["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(traces) == count, "a number must not cause a new trace"
    # Only the first weight of the clean loss does, which had no gradient yet.
    model.mix = 0.0
    logs = evaluate(model, x, y)
    assert logs["loss"] == pytest.approx(logs["clean_loss"], rel=1e-5)
    count = len(traces)
    for mix in 0.5, 1.0:
        model.mix = mix
        evaluate(model, x, y)
    assert len(traces) == count, "a number must not cause a new trace"
    model.rho = schedule(0.4, 4)
    model.optimizer.iterations.assign(3)
    assert evaluate(model, x, y)["loss"] == pytest.approx(high, rel=1e-5)
    model.rho = 0.1
    assert evaluate(model, x, y)["loss"] == pytest.approx(low, rel=1e-5)
    # A value that is refused changes nothing.
    for wrong in 1.5, lambda step: 1.5:
        with pytest.raises(ValueError, match="between 0 and 1"):
            model.mix = wrong
        assert model.mix == 1.0


# Saving ---------------------------------------------------------------------


@pytest.mark.eager
def test_training_goes_on_after_loading(wrap, data, tmp_path):
    x, y = data
    model = compiled(
        wrap,
        rho=schedule(0.3, 4),
        mix=schedule(1.0, 4),
        optimizer=keras.optimizers.Adam(0.05),
    )
    fit(model, x, y, epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    pickled = pickle.loads(pickle.dumps(model))
    for copy in loaded, pickled:
        assert type(copy) is wrap
        assert (copy.rho, copy.mix) == pytest.approx((0.15, 0.5))
        assert_same(copy.get_weights(), model.get_weights(), 0.0)
        assert_same(
            [variable.numpy() for variable in copy.optimizer.variables],
            [variable.numpy() for variable in model.optimizer.variables],
            0.0,
        )
    logs, loaded_logs = (fit(m, x, y, epochs=2) for m in (model, loaded))
    assert loaded_logs.keys() == logs.keys()
    assert loaded_logs["loss"] == pytest.approx(logs["loss"], rel=1e-5)
    assert_same(loaded.get_weights(), model.get_weights())


def test_weights_and_config(wrap, data, tmp_path):
    x, y = data
    settings = {
        "mask": [True, True, True, False, True, True],
        "weights": [1.0, 2.0, 1.0, 1.0, 0.5, 1.0],
    }
    if wrap is SteadyRUBModel:
        settings.update(input_range=(-5.0, 5.0), vertices="all")
        settings.update(memory_budget=2**20)
    else:
        settings.update(norm=2)
    model = wrap(mlp(), rho=0.3, mix=0.7, name="robust", **settings)
    config = model.get_config()
    json.dumps(config)
    again = wrap.from_config(config)
    assert again.get_config() == config
    assert np.abs(again(x) - model(x)).max() > 0.1  # fresh weights
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(
        robust_loss(again, x, y),
        robust_loss(model, x, y),
        atol=1e-6,
    )


def test_the_base_stays_a_plain_keras_model(model, data, tmp_path):
    x, y = data
    fit(model, x, y)
    outputs = model.predict(x, verbose=0)
    assert_same(model.get_weights(), model.base.get_weights(), 0.0)
    clone = keras.models.clone_model(model.base)
    clone.set_weights(model.base.get_weights())
    np.testing.assert_allclose(clone(x), outputs, atol=1e-6)
    model.base.save(tmp_path / "base.keras")
    loaded = keras.models.load_model(tmp_path / "base.keras")
    assert type(loaded) is type(model.base)
    assert "keras_rub" not in loaded.to_json()
    np.testing.assert_allclose(loaded(x), outputs, atol=1e-6)
