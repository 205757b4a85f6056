"""The ramps of the radius."""

import warnings

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub.callbacks import RhoSchedule


def test_linear_ramp():
    ramp = RhoSchedule(2.0, epochs=4, start=1.0, wait=1)
    values = [ramp.value(epoch) for epoch in range(7)]
    np.testing.assert_allclose(values, [1, 1, 1.25, 1.5, 1.75, 2, 2])


def test_smooth_ramp_is_flat_at_both_ends():
    ramp = RhoSchedule(1.0, epochs=100, shape="smooth")
    values = np.array([ramp.value(epoch) for epoch in range(101)])
    assert values[0] == 0.0 and values[-1] == 1.0
    assert np.all(np.diff(values) > 0)
    assert np.diff(values)[0] < 0.001 and np.diff(values)[-1] < 0.001
    np.testing.assert_allclose(values[50], 0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shape": "steep"}, "`shape` must be"),
        ({"epochs": 0}, "`epochs` must be"),
        ({"wait": -1}, "`wait`"),
        ({"rho": -1.0}, "`rho` must be"),
        ({"parameter": "lr"}, "`parameter` must be"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RhoSchedule(**kwargs)


def test_plain_model_is_refused():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="needs a robust model"):
        model.fit(
            np.zeros((4, 2)),
            np.zeros((4, 2)),
            callbacks=[keras_rub.callbacks.RhoSchedule(1.0)],
            verbose=0,
        )


def test_training_stuck_at_chance_is_said_once(rng):
    x = rng.normal(size=(128, 4)).astype("float32")
    y = rng.integers(0, 3, 128)

    def train(rho, labels, **settings):
        base = keras_rub.models.mlp([4], 3, (8,))
        model = keras_rub.RUBModel(base, rho)
        model.compile(
            keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy"
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, labels, batch_size=4, verbose=0, **settings)
        return [str(w.message) for w in caught if "chance" in str(w.message)]

    (message,) = train(20.0, y, epochs=3)
    assert "RhoSchedule" in message and "`rho=20`" in message
    learnable = (x[:, 0] > 0).astype(int)
    # Also where callbacks are given, in every form that Keras takes.
    ramp = keras_rub.callbacks.RhoSchedule(epochs=2)
    assert not train(0.05, learnable, epochs=2, callbacks=ramp)
