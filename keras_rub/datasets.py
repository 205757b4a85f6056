"""Data sets by name: embedded ones, and files of a data folder."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import zipfile

import numpy as np
from sklearn import datasets as embedded
from sklearn.model_selection import train_test_split

ENVIRONMENT_VARIABLE = "KERAS_RUB_DATA"

_EMBEDDED = {
    "digits": embedded.load_digits,
    "iris": embedded.load_iris,
    "wine": embedded.load_wine,
    "breast_cancer": embedded.load_breast_cancer,
}
_IMAGES = ("mnist", "fashion_mnist", "cifar10")
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test samples of one data set.

    Attributes:
        name: the name it was loaded by.
        train: pair of arrays, inputs [n, *features] float32 and class
            numbers [n] int64.
        validation: the same, for choosing hyper-parameters.
        test: the same, for the final figures.
        num_classes: K.
        input_range: pair `(low, high)` of the valid inputs, or `None`.
        source: where the data came from.
    """

    name: str
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    num_classes: int
    input_range: tuple[float, float] | None
    source: str

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.train[0].shape[1:]


def names(data_dir: str | os.PathLike | None = None) -> list[str]:
    """The data sets that `load` finds: embedded, then those of the folder."""
    folder = _folder(data_dir)
    found = sorted(_EMBEDDED)
    if folder is not None:
        found += [n for n in _IMAGES if (folder / f"{n}.npz").exists()]
        found += sorted(path.stem for path in (folder / "uci").glob("*.npz"))
    return found


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    *,
    validation_images: int = 1000,
) -> Dataset:
    """Loads a data set.

    Embedded sets (digits, iris, wine, breast_cancer) come with scikit-learn
    and are split 60/20/20 at random, the same way each time; digits are
    scaled to [0, 1], the others are standardised with the statistics of the
    training set. Images (mnist, fashion_mnist, cifar10) are scaled to [0, 1];
    the first `validation_images` of the training set are held out. The UCI
    sets of the paper are standardised already; the last quarter of the
    training rows is held out, and NaN (a feature that is constant in the
    training set) becomes 0.

    Args:
        name: see `names()`, or the path of an `.npz` file with the arrays
            `x_train`, `y_train`, `x_test` and `y_test`.
        data_dir: folder with `NAME.npz` and `uci/NAME.npz`. Defaults to
            `None`, the environment variable `KERAS_RUB_DATA`.
        validation_images: int. Images held out for validation. Defaults to
            `1000`.

    Returns:
        A `Dataset`.
    """
    if name in _EMBEDDED:
        return _load_embedded(name)
    folder = _folder(data_dir)
    if name.endswith(".npz"):
        path = pathlib.Path(name)
    elif folder is None:
        raise ValueError(
            f"Data set {name!r} is not embedded. Known without a data folder: "
            f"{sorted(_EMBEDDED)}. For others give a folder by `data_dir`, "
            f"--data_dir or the environment variable {ENVIRONMENT_VARIABLE}."
        )
    else:
        path = (
            folder / f"{name}.npz"
            if name in _IMAGES
            else (folder / "uci" / f"{name}.npz")
        )
        if not path.exists():
            near = difflib.get_close_matches(name, names(folder), n=4)
            raise ValueError(
                f"No data set {name!r} in {folder}: {path} is missing. "
                + (f"Near names: {near}." if near else "")
            )
    arrays = _read(path)
    if name in _IMAGES or arrays["x_train"].dtype == np.uint8:
        return _images(name, path, arrays, validation_images)
    return _table(name, path, arrays)


def _folder(data_dir) -> pathlib.Path | None:
    data_dir = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if not data_dir:
        return None
    folder = pathlib.Path(data_dir)
    if not folder.is_dir():
        raise ValueError(f"The data folder {folder} does not exist.")
    return folder


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in _ARRAYS if key not in file]
            if missing:
                raise ValueError(f"it lacks the arrays {missing}")
            arrays = {key: file[key] for key in _ARRAYS}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is no data set of the form expected (an .npz file with "
            f"the arrays {', '.join(_ARRAYS)}): {error}"
        ) from error
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"{path}: x_{part} and y_{part} must have the same length, "
                f"above 0. Received: {len(x)} and {len(y)}"
            )
    return arrays


def _images(name, path, arrays, held_out) -> Dataset:
    def scaled(x):
        x = x.astype("float32") / 255.0
        return x[..., None] if x.ndim == 3 else x

    x, y = scaled(arrays["x_train"]), arrays["y_train"].astype("int64")
    if not 0 < held_out < len(x):
        raise ValueError(
            f"`validation_images` must be between 1 and {len(x) - 1}. "
            f"Received: `validation_images={held_out}`"
        )
    return Dataset(
        name=name,
        train=(x[held_out:], y[held_out:]),
        validation=(x[:held_out], y[:held_out]),
        test=(scaled(arrays["x_test"]), arrays["y_test"].astype("int64")),
        num_classes=int(y.max()) + 1,
        input_range=(0.0, 1.0),
        source=f"{path.name} of the data folder",
    )


def _table(name, path, arrays) -> Dataset:
    x = np.nan_to_num(arrays["x_train"].astype("float32"), posinf=0, neginf=0)
    test = np.nan_to_num(arrays["x_test"].astype("float32"), posinf=0, neginf=0)
    y, test_y = (arrays[key].astype("int64") for key in ("y_train", "y_test"))
    first = len(x) - len(x) // 4
    return Dataset(
        name=name,
        train=(x[:first], y[:first]),
        validation=(x[first:], y[first:]),
        test=(test, test_y),
        num_classes=int(max(y.max(), test_y.max())) + 1,
        input_range=None,
        source=f"{path.name} of the data folder",
    )


def _load_embedded(name) -> Dataset:
    bunch = _EMBEDDED[name]()
    x, y = bunch.data.astype("float32"), bunch.target.astype("int64")
    rest_x, test_x, rest_y, test_y = train_test_split(
        x, y, test_size=0.2, stratify=y, random_state=0
    )
    train_x, valid_x, train_y, valid_y = train_test_split(
        rest_x, rest_y, test_size=0.25, stratify=rest_y, random_state=0
    )
    if name == "digits":
        shift, scale, input_range = 0.0, 16.0, (0.0, 1.0)
    else:
        shift, scale, input_range = train_x.mean(0), train_x.std(0), None
    train_x, valid_x, test_x = (
        ((part - shift) / scale).astype("float32")
        for part in (train_x, valid_x, test_x)
    )
    return Dataset(
        name=name,
        train=(train_x, train_y),
        validation=(valid_x, valid_y),
        test=(test_x, test_y),
        num_classes=int(y.max()) + 1,
        input_range=input_range,
        source="scikit-learn",
    )
