"""Data sets by name."""

import numpy as np
import pytest

from keras_rub import datasets


@pytest.mark.parametrize(
    ("name", "features", "classes"),
    [("digits", 64, 10), ("iris", 4, 3), ("wine", 13, 3)],
)
def test_embedded(name, features, classes):
    data = datasets.load(name)
    assert data.input_shape == (features,)
    assert data.num_classes == classes
    for x, y in (data.train, data.validation, data.test):
        assert x.dtype == np.float32 and len(x) == len(y)
        assert set(y) == set(range(classes))
    again = datasets.load(name)
    np.testing.assert_array_equal(data.test[0], again.test[0])
    if data.input_range is None:
        np.testing.assert_allclose(data.train[0].mean(0), 0.0, atol=1e-5)
        np.testing.assert_allclose(data.train[0].std(0), 1.0, atol=1e-5)
    else:
        assert data.train[0].min() == 0.0 and data.train[0].max() == 1.0


def save(path, **arrays):
    """A data set file of 8 rows."""
    path.parent.mkdir(exist_ok=True)
    arrays = {
        "x_train": np.arange(16.0).reshape(8, 2),
        "y_train": np.arange(8) % 2,
        "x_test": np.ones((4, 2)),
        "y_test": np.arange(4) % 2,
        **arrays,
    }
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


def test_table_of_a_folder(tmp_path, monkeypatch):
    x = np.arange(16.0).reshape(8, 2)
    x[0, 1] = np.nan
    save(tmp_path / "uci" / "mine.npz", x_train=x)
    monkeypatch.setenv("KERAS_RUB_DATA", str(tmp_path))
    assert "mine" in datasets.names()
    data = datasets.load("mine")
    assert len(data.train[0]) == 6 and len(data.validation[0]) == 2
    assert data.train[0][0, 1] == 0.0
    with pytest.raises(ValueError, match="Near names: .*'mine'"):
        datasets.load("mime")


def test_images_of_a_folder(tmp_path):
    images = np.full((8, 5, 5), 255, np.uint8)
    save(tmp_path / "mnist.npz", x_train=images, x_test=images[:4])
    data = datasets.load("mnist", tmp_path, validation_images=3)
    assert data.input_shape == (5, 5, 1) and data.input_range == (0.0, 1.0)
    assert len(data.train[0]) == 5 and data.train[0].max() == 1.0
    with pytest.raises(ValueError, match="`validation_images`"):
        datasets.load("mnist", tmp_path, validation_images=8)


def test_broken_files(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_RUB_DATA", raising=False)
    with pytest.raises(ValueError, match="KERAS_RUB_DATA"):
        datasets.load("mnist")
    with pytest.raises(ValueError, match="does not exist"):
        datasets.load("mnist", tmp_path / "nowhere")
    path = tmp_path / "bad.npz"
    path.write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(ValueError, match="bad.npz is no data set"):
        datasets.load(str(path))
    save(path, y_test=None)
    with pytest.raises(ValueError, match="lacks the arrays"):
        datasets.load(str(path))
    save(path, y_test=np.zeros(3))
    with pytest.raises(ValueError, match="same length"):
        datasets.load(str(path))
    # A pickled object is never loaded.
    save(path, x_train=np.array([{"a": 1}] * 8, dtype=object))
    with pytest.raises(ValueError, match="is no data set"):
        datasets.load(str(path))
