"""The networks of the paper."""

import pytest

from keras_rub import models


def test_mlp():
    model = models.mlp((784,), 10)
    assert model.count_params() == 785 * 200 + 2 * 201 * 200 + 201 * 10
    assert models.mlp((28, 28, 1), 3, hidden=(5,)).output_shape == (None, 3)


def test_cnn():
    model = models.cnn((28, 28, 1), 10)
    expected = 26 * 32 + (25 * 32 + 1) * 64 + (49 * 64 + 1) * 1024 + 10250
    assert model.count_params() == expected
    with pytest.raises(ValueError, match="height, width, channels"):
        models.cnn((784,), 10)
