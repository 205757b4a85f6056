"""Data sets by name."""

import os

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
        np.testing.assert_allclose(data.train[0].std(0), 1.0, atol=1e-4)
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


def images(rng, count=8, shape=(5, 5)):
    return rng.integers(0, 256, (count, *shape)).astype(np.uint8)


def test_images_of_a_folder(tmp_path, rng):
    found = images(rng)
    found[0] = 255
    save(tmp_path / "mnist.npz", x_train=found, x_test=found[:4])
    with pytest.raises(ValueError, match="mnist.npz is not mnist.*SHA-256"):
        datasets.load("mnist", tmp_path)
    options = {"validation_images": 3, "verify": False}
    data = datasets.load("mnist", tmp_path, **options)
    assert data.input_shape == (5, 5, 1) and data.input_range == (0.0, 1.0)
    assert len(data.train[0]) == 5 and data.validation[0].max() == 1.0
    assert data.units == "pixels in [0, 1]" and data.is_image
    with pytest.raises(ValueError, match="`validation_images`"):
        datasets.load("mnist", tmp_path, validation_images=8, verify=False)


def test_images_standardised_one_by_one(tmp_path, rng):
    colour = images(rng, shape=(6, 6, 3))
    colour[0, ..., 1] = 7  # one grey level: nothing to divide by
    save(tmp_path / "own.npz", x_train=colour, x_test=colour[:4])
    data = datasets.load(
        str(tmp_path / "own.npz"),
        normalization="standard",
        validation_images=2,
    )
    x = data.train[0]
    assert x.dtype == np.float32 and data.input_range is None
    np.testing.assert_allclose(x.mean(axis=(1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=(1, 2)), 1.0, atol=1e-4)
    assert np.all(np.isfinite(data.validation[0]))
    # The factor to pixels in [0, 1] is the images' own deviation.
    expected = (colour[2:] / 255.0).std(axis=(1, 2)).mean()
    assert data.raw_scale == pytest.approx(expected, rel=1e-4)
    assert f"{expected:.3f} in pixels" in data.units
    raw = datasets.load(
        str(tmp_path / "own.npz"), normalization="none", validation_images=2
    )
    assert raw.train[0].max() > 1 and raw.input_range == (0.0, 255.0)


def test_units_of_tables():
    raw = datasets.load("wine", normalization="none")
    data = datasets.load("wine")
    np.testing.assert_allclose(
        data.raw_scale, raw.train[0].std(axis=0), rtol=1e-4
    )
    assert len(data.feature_names) == 13 and "alcohol" in data.feature_names
    unit = datasets.load("wine", normalization="unit")
    assert unit.train[0].min() == 0.0 and unit.train[0].max() == 1.0
    assert unit.input_range is None  # test rows may leave it
    with pytest.raises(ValueError, match="`normalization` must be one of"):
        datasets.load("wine", normalization="l2")


def test_batches():
    data = datasets.load("iris")
    batches = list(data.batches("test", 8))
    assert [len(y) for _, y in batches] == [8, 8, 8, 6]
    np.testing.assert_array_equal(batches[0][0], data.test[0][:8])
    first, again = (next(iter(data.batches("train", 90)))[1] for _ in "ab")
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, data.train[1])
    with pytest.raises(ValueError, match="`part` must be"):
        data.batches("all")


def test_batches_of_moved_images(tmp_path, rng):
    """Every image is a shifted, perhaps mirrored copy with repeated edges."""
    x = images(rng, 24, (5, 4))
    save(
        tmp_path / "mine.npz",
        x_train=x,
        y_train=np.arange(24) % 2,
        x_test=x[:4],
    )
    data = datasets.load(str(tmp_path / "mine.npz"), validation_images=4)
    options = {"shuffle": False, "shift": 2, "flip": True}
    batches = list(data.batches("train", 10, **options).as_numpy_iterator())
    again = data.batches("train", 10, **options).skip(1)
    np.testing.assert_array_equal(next(iter(again))[0], batches[1][0])
    moved = np.concatenate([batch[0] for batch in batches])
    seen = set()
    for original, found in zip(data.train[0], moved, strict=True):
        padded = np.pad(original, ((2, 2), (2, 2), (0, 0)), mode="edge")
        seen |= {
            (down, right, turn)
            for down in range(5)
            for right in range(5)
            for turn in (1, -1)
            if np.array_equal(
                padded[down : down + 5, right : right + 4][:, ::turn], found
            )
        }
    assert len({down for down, _, _ in seen}) > 2
    assert len({right for _, right, _ in seen}) > 2
    assert {turn for _, _, turn in seen} == {1, -1}
    assert not np.array_equal(batches[0][0][:4], batches[1][0][:4])
    with pytest.raises(ValueError, match="Only images can be shifted"):
        datasets.load("iris").batches(shift=1)


def test_names():
    names = datasets.names()
    assert names[:4] == ["breast_cancer", "digits", "iris", "wine"]
    assert {"mnist", "cifar10", "uci/iris", "uci/wine", "yeast"} <= set(names)
    assert len(datasets.UCI) == 46


@pytest.mark.skipif(
    "KERAS_RUB_DATA" not in os.environ, reason="needs the data folder"
)
def test_all_sets_of_the_real_folder():
    for name in datasets.names():
        data = datasets.load(name)
        assert np.all(np.isfinite(data.train[0])), name
        assert data.train[1].max() < data.num_classes >= 2, name
    # The paper: a standardised MNIST image moves 3.2 times less at equal rho.
    mnist = datasets.load("mnist", normalization="standard")
    assert 1 / mnist.raw_scale == pytest.approx(3.2, abs=0.2)


TABLE = """age,dose,place,answer
1,2.5,0,yes
2,,1,no
3,1.5,0,yes
4,0.5,1,no
5,2.0,?,maybe
6,2.0,1,no
7,1.0,0,yes
8,3.0,1,maybe
"""


def test_csv(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(TABLE)
    with pytest.raises(ValueError, match="own.csv holds 2 missing"):
        datasets.load(str(path))
    data = datasets.load(str(path), label="answer", missing="mean")
    assert data.num_classes == 3
    assert data.feature_names == ("age", "dose", "place")
    parts = (data.train, data.validation, data.test)
    assert sum(len(y) for _, y in parts) == 8
    for x, _ in parts:
        assert np.all(np.isfinite(x))
    dropped = datasets.load(str(path), missing="drop")
    parts = (dropped.train, dropped.validation, dropped.test)
    assert sum(len(y) for _, y in parts) == 6
    # Another column can be the label; then words are categories.
    with pytest.raises(ValueError, match="'place' must hold a class.* 1 rows"):
        datasets.load(str(path), label="place", missing="mean")
    with pytest.raises(ValueError, match="no column 'x'.*'age'"):
        datasets.load(str(path), label="x")
    with pytest.raises(ValueError, match="`missing` must be"):
        datasets.load(str(path), missing="zero")
    path.write_text(TABLE + "1,2\n")
    with pytest.raises(ValueError, match="line 10: 2 cells"):
        datasets.load(str(path))
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="at least 4 rows"):
        datasets.load(str(path))
    with pytest.raises(ValueError, match="does not exist"):
        datasets.load(str(tmp_path / "none.csv"))


def test_uci_set_as_csv(tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "seeds.csv").write_text(TABLE.replace("?", "0"))
    data = datasets.load("seeds", tmp_path, missing="mean")
    assert data.num_classes == 3
    with pytest.raises(ValueError, match="neither .*yeast.npz nor yeast.csv"):
        datasets.load("yeast", tmp_path)


def test_prepared_tensorflow_datasets(tmp_path, rng, monkeypatch):
    """A small folder under the true name and version, without network."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    monkeypatch.delenv("KERAS_RUB_DATA", raising=False)
    found = images(rng, 12, (28, 28, 1))
    split = tf.data.Dataset.from_tensor_slices(
        {"image": found, "label": np.arange(12) % 10}
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        name="mnist",
        version="3.0.1",
        data_dir=tmp_path,
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        ),
        split_datasets={"train": split, "test": split},
    )
    data = datasets.load("mnist", tmp_path, validation_images=2)
    assert data.source == "tensorflow-datasets"
    assert data.input_shape == (28, 28, 1) and len(data.train[0]) == 10
    assert data.train[0].max() <= 1.0


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_RUB_DATA", raising=False)
    for key in list(os.environ):
        if key.lower().endswith("_proxy"):
            monkeypatch.delenv(key)

    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(
        ValueError, match="can't be downloaded.*fashion_mnist.npz.*--data_dir"
    ):
        datasets.load("fashion_mnist", tmp_path)


def test_broken_files(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_RUB_DATA", raising=False)
    with pytest.raises(ValueError, match="KERAS_RUB_DATA"):
        datasets.load("yeast")
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
    with pytest.raises(ValueError, match="is no data set|must hold numbers"):
        datasets.load(str(path))
