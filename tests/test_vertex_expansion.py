"""The layer that lists the vertices of an L1 ball."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_rub


def test_hand_computed():
    x = np.array([[1.0, 2.0]], "float32")
    found = keras_rub.VertexExpansion(rho=0.5)(x)
    expected = [[[1.5, 2.0], [1.0, 2.5], [0.5, 2.0], [1.0, 1.5]]]
    np.testing.assert_allclose(found, expected)


def test_mask_weights_and_images():
    x = np.zeros((2, 2, 2, 1), "float32")
    mask = np.array([[1, 0], [0, 1]])[..., None]
    layer = keras_rub.VertexExpansion(rho=1.0, mask=mask, weights=2.0)
    found = np.array(layer(x))
    assert found.shape == (2, 4, 2, 2, 1)
    assert layer.num_vertices == 4
    np.testing.assert_allclose(found[1, 0, 0, 0, 0], 0.5)
    np.testing.assert_allclose(found[1, 3, 1, 1, 0], -0.5)
    # Every vertex is on the weighted sphere and moves one feature.
    moves = np.abs(found).reshape(2, 4, -1)
    np.testing.assert_allclose(2.0 * moves.sum(-1), 1.0)
    np.testing.assert_array_equal((moves > 0).sum(-1), 1)


def test_chosen_vertices_and_radii():
    x = np.zeros((2, 3), "float32")
    layer = keras_rub.VertexExpansion()
    layer.build((None, 3))
    found = layer(x, vertices=np.array([[0], [5]]), rho=np.array([1.0, 2.0]))
    np.testing.assert_allclose(found, [[[1, 0, 0]], [[0, 0, -2]]])
    shared = layer(x, vertices=np.array([1, 4]), rho=np.array([1.0, 2.0]))
    np.testing.assert_allclose(
        shared, [[[0, 1, 0], [0, -1, 0]], [[0, 2, 0], [0, -2, 0]]]
    )


def test_in_a_functional_model_that_is_saved(tmp_path):
    inputs = layers.Input((3,))
    outputs = keras_rub.VertexExpansion(rho=0.25, mask=[1, 1, 0])(inputs)
    model = keras.Model(inputs, outputs)
    assert model.output_shape == (None, 4, 3)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), again.predict(x, verbose=0)
    )


def test_errors():
    with pytest.raises(ValueError, match="known size"):
        keras_rub.VertexExpansion().build((None, None, 3))
    with pytest.raises(ValueError, match="`rho` must be"):
        keras_rub.VertexExpansion(rho=-1.0)
    with pytest.raises(ValueError, match="`mask` must broadcast"):
        keras_rub.VertexExpansion(mask=[True, False])(np.zeros((1, 3)))
