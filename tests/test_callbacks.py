"""The ramps of the radius."""

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
