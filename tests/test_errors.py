"""Bad input gets a clear error at once, from every robust model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub

X = np.linspace(0.0, 1.0, 40, dtype="float32").reshape(10, 4)
Y = np.arange(10) % 3

BOTH = pytest.mark.parametrize(
    "wrap", [keras_rub.RUBModel, keras_rub.ARUBModel]
)


def net(outputs=3, activation=None):
    """A small classifier of four features."""
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5, activation="relu"),
            layers.Dense(outputs, activation=activation),
        ]
    )


class Own(layers.Dense):
    """A layer with a `call` of its own, which may do anything."""

    def call(self, inputs):
        return super().call(inputs) * 2.0


def compiled(wrap, **kwargs):
    """A robust model, ready for fit."""
    model = wrap(net(), **kwargs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@BOTH
@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        (
            lambda: net(outputs=1, activation="softmax"),
            ValueError,
            "the same for every input.*sigmoid",
        ),
        (
            lambda: keras.Sequential(
                [net(), layers.Softmax(activity_regularizer="l2")]
            ),
            ValueError,
            "`activity_regularizer` of the last layer",
        ),
        (
            lambda: keras.Sequential([net(), Own(3, activation="softmax")]),
            ValueError,
            "can't be taken off.*Own",
        ),
        (lambda: keras.Sequential(), ValueError, "no layers"),
        (lambda: layers.Dense(3), TypeError, "keras.Model.*Dense"),
        (lambda: keras_rub.RUBModel(net()), ValueError, "robust model already"),
        (
            lambda: keras.Sequential([layers.Input((4, 2)), layers.Dense(3)]),
            ValueError,
            r"one tensor of logits or probabilities \[batch, K\]",
        ),
    ],
)
def test_base(wrap, base, error, message):
    with pytest.raises(error, match=message):
        wrap(base())


@BOTH
@pytest.mark.parametrize("rho", [-1.0, np.nan, np.inf, "large", None])
def test_rho(wrap, rho):
    with pytest.raises((TypeError, ValueError), match="`rho` must be"):
        wrap(net(), rho=rho)


@BOTH
@pytest.mark.parametrize("mix", [-0.1, 1.5, np.nan])
def test_mix(wrap, mix):
    with pytest.raises(ValueError, match="`mix` must be"):
        wrap(net(), mix=mix)


@pytest.mark.parametrize("norm", [0, 3, "two", True, -1])
def test_norm(norm):
    with pytest.raises(ValueError, match='`norm` must be 1, 2 or "inf"'):
        keras_rub.ARUBModel(net(), norm=norm)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mask": [True, False]}, r"`mask` must broadcast .*\(4,\)"),
        ({"mask": [0.5, 1, 1, 1]}, "`mask` must hold only true and false"),
        ({"weights": [1.0, 2.0, 3.0]}, r"`weights` must broadcast .*\(4,\)"),
        ({"weights": [1.0, 0.0, 1.0, 1.0]}, "`weights` must be .* above 0"),
        ({"input_range": (1.0, 0.0)}, "low < high"),
        ({"input_range": (1.0, 1.0)}, "low < high"),
        ({"input_range": 3.0}, "pair"),
        ({"input_range": (np.zeros(3), 1.0)}, "`input_range low` must broad"),
        ({"vertices": 0}, "`vertices` must be"),
        ({"vertices": "some"}, "`vertices` must be"),
        ({"memory_budget": 0}, "`memory_budget` must be"),
    ],
)
def test_perturbation_set(kwargs, message):
    with pytest.raises(ValueError, match=message):
        keras_rub.RUBModel(net(), **kwargs)


@BOTH
@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        ),
        # Keras compares with 0 in it: it is no function of differences.
        "categorical_hinge",
        "mse",
        keras.losses.MeanSquaredError(),
        "kl_divergence",
    ],
)
def test_loss_without_the_property(wrap, loss):
    with pytest.raises(ValueError, match="differences of logits"):
        wrap(net()).compile("sgd", loss)


@pytest.mark.parametrize(
    "wrap", [keras_rub.RUBModel, keras_rub.ARUBModel, keras_rub.PGDModel]
)
@pytest.mark.parametrize(
    ("outputs", "activation", "loss", "message"),
    [
        (3, None, keras.losses.SparseCategoricalCrossentropy(), "returns logi"),
        (3, None, keras.losses.CategoricalCrossentropy(), "returns logits"),
        (
            3,
            None,
            keras.losses.sparse_categorical_crossentropy,
            "returns logits",
        ),
        (1, None, keras.losses.BinaryCrossentropy(), "returns logits"),
        (
            3,
            "softmax",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "ends with softmax.*from_logits=False",
        ),
        (
            1,
            "sigmoid",
            keras.losses.BinaryCrossentropy(from_logits=True),
            "ends with sigmoid.*from_logits=False",
        ),
        (
            3,
            "log_softmax",
            keras.losses.SparseCategoricalCrossentropy(),
            "returns log-probabilities.*from_logits=True",
        ),
        (1, None, "sparse_categorical_crossentropy", "binary cross entropy"),
        (1, "sigmoid", "categorical_crossentropy", "binary cross entropy"),
        (3, "sigmoid", "categorical_crossentropy", "a softmax in the sigm"),
        (3, "softmax", "binary_crossentropy", "categorical cross entropy"),
    ],
)
def test_loss_whose_meaning_is_open(wrap, outputs, activation, loss, message):
    with pytest.raises(ValueError, match=message) as caught:
        wrap(net(outputs, activation)).compile("sgd", loss)
    assert "\n" not in str(caught.value)


@BOTH
def test_loss_of_a_compiled_base(wrap):
    base = net()
    base.compile("sgd", "mse")
    with pytest.raises(ValueError, match="differences of logits"):
        wrap(base)


@BOTH
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range(wrap, label):
    y = Y.copy()
    y[4] = label
    with pytest.raises(ValueError, match="class numbers from 0 to 2"):
        compiled(wrap).fit(X, y, verbose=0)
    with pytest.raises(ValueError, match="class numbers from 0 to 2"):
        compiled(wrap).worst_case_margins(X, y)


@BOTH
def test_labels_of_a_wrong_form(wrap):
    with pytest.raises(ValueError, match="single 1 in each row"):
        compiled(wrap).worst_case_margins(X, np.full((10, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"one-hot rows \[batch, 3\]"):
        compiled(wrap).worst_case_margins(X, np.zeros((10, 5)))
    with pytest.raises(ValueError, match="needs the labels"):
        compiled(wrap).fit(X, verbose=0)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_x_that_is_not_finite(wrap, bad):
    x = X.copy()
    x[3, 1] = bad
    with pytest.raises(ValueError, match="`x` holds NaN or infinite"):
        compiled(wrap).fit(x, Y, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(5)
    with pytest.raises(ValueError, match="`x` holds NaN or infinite"):
        compiled(wrap).evaluate(data, verbose=0)


def test_x_that_leaves_the_valid_range():
    model = compiled(keras_rub.RUBModel, input_range=(0.0, 0.9))
    with pytest.raises(ValueError, match="`x` leaves `input_range`"):
        model.fit(X, Y, verbose=0)


def test_several_inputs():
    a, b = layers.Input((4,)), layers.Input((4,))
    base = keras.Model([a, b], layers.Dense(3)(layers.Add()([a, b])))
    for defense in (keras_rub.RUBModel, keras_rub.ARUBModel):
        with pytest.raises(ValueError, match="`perturb` must name the one"):
            defense(base)
    model = keras_rub.ARUBModel(base, perturb=a.name)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="must hold the inputs"):
        model.worst_case_margins([X, X, X], Y)
    model.fit([X, X], Y, verbose=0)


def test_unknown_image_size():
    base = keras.Sequential(
        [
            layers.Input((None, None, 1)),
            layers.Conv2D(2, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    with pytest.raises(ValueError, match="known size"):
        keras_rub.RUBModel(base)


@BOTH
def test_radius_of_worst_case_margins(wrap):
    for rho in (-1.0, np.nan, np.ones((10, 2))):
        with pytest.raises(ValueError, match="`rho` must be"):
            compiled(wrap).worst_case_margins(X, Y, rho=rho)
