"""Where data comes from: scikit-learn, tensorflow-datasets, files."""

from __future__ import annotations

import hashlib
import os
import pathlib
import socket
import urllib.parse
from typing import Any

import numpy as np

from keras_rub.datasets.cells import Cells, column_names, is_frame, read_cells
from keras_rub.datasets.dataset import RawData, training_rows
from keras_rub.datasets.schema import Schema, TableOptions, natural_order

ENVIRONMENT_VARIABLE = "KERAS_RUB_DATA"

# Sets that come with scikit-learn.
EMBEDDED = ("digits", "iris", "wine", "breast_cancer")

# Of the test images and labels, as unsigned bytes.
_IMAGE_DIGESTS = {
    "mnist": (
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
    "fashion_mnist": (
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
    "cifar10": (
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}
IMAGES = tuple(_IMAGE_DIGESTS)

UCI = (
    "arrhythmia",
    "balance-scale",
    "banknote-authentication",
    "blood-transfusion-service-center",
    "breast-cancer-wisconsin-diagnostic",
    "breast-cancer-wisconsin-original",
    "breast-cancer-wisconsin-prognostic",
    "climate-model-simulation-crashes",
    "cnae-9",
    "connectionist-bench",
    "connectionist-bench-sonar",
    "dermatology",
    "echocardiogram",
    "ecoli",
    "glass-identification",
    "haberman-survival",
    "hayes-roth",
    "hepatitis",
    "hill-valley",
    "hill-valley-noise",
    "image-segmentation",
    "ionosphere",
    "iris",
    "letter-recognition",
    "libras-movement",
    "magic-gamma-telescope",
    "optical-recognition-handwritten-digits",
    "ozone-level-detection-eight",
    "ozone-level-detection-one",
    "parkinsons",
    "pen-based-recognition-handwritten-digits",
    "planning-relax",
    "poker-hand",
    "qsar-biodegradation",
    "seeds",
    "skin-segmentation",
    "spambase",
    "spectf-heart",
    "statlog-project-landsat-satellite",
    "thyroid-disease-ann-thyroid",
    "thyroid-disease-new-thyroid",
    "wall-following-robot-navigation-2",
    "wall-following-robot-navigation-24",
    "wall-following-robot-navigation-4",
    "wine",
    "yeast",
)

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_FEWEST_ROWS = 4
_MANY_CLASSES = 30  # more of them must each have a few rows


def data_folder(data_dir: str | os.PathLike | None) -> pathlib.Path | None:
    """The data folder asked for or set in the environment, if any."""
    data_dir = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if not data_dir:
        return None
    folder = pathlib.Path(data_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"The data folder {folder} does not exist.")
    return folder


def read_embedded(name: str) -> RawData:
    """A set that comes with scikit-learn; 80/20, the same way each time."""
    from sklearn import datasets as embedded  # slow to import

    bunch = getattr(embedded, f"load_{name}")()
    names = tuple(str(feature) for feature in bunch.feature_names)
    return _split(
        bunch.data,
        bunch.target,
        source="scikit-learn",
        feature_names=names,
        class_names=tuple(str(name) for name in bunch.target_names),
        value_range=(0.0, 16.0) if name == "digits" else None,
    )


def read_npz(path: pathlib.Path, missing: str = "error") -> RawData:
    """A file with the arrays x_train, y_train, x_test and y_test."""
    try:
        with np.load(path, allow_pickle=False) as file:
            absent = [key for key in _ARRAYS if key not in file]
            if absent:
                raise ValueError(f"it lacks the arrays {absent}")
            arrays = {key: file[key] for key in _ARRAYS}
    except Exception as error:  # many kinds, for many kinds of broken files
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
        if not np.issubdtype(x.dtype, np.number) or y.ndim != 1:
            raise ValueError(
                f"{path}: x_{part} must hold numbers and y_{part} one class "
                f"number a row. Received: dtype {x.dtype}, shape {y.shape}"
            )
        if y.min() < 0 or not np.all(y == np.round(y)):
            raise ValueError(
                f"{path}: y_{part} must hold class numbers from 0. Received: "
                f"values from {y.min()} to {y.max()}"
            )
    train = (arrays["x_train"], arrays["y_train"])
    test = (arrays["x_test"], arrays["y_test"])
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(
            f"{path}: x_train and x_test must have the same features. "
            f"Received: shapes {train[0].shape} and {test[0].shape}"
        )
    train, test = _handle_missing(path, train, test, missing)
    return RawData(train, test, source=f"{path.name} of the data folder")


def read_images(name: str, path: pathlib.Path, verify: bool) -> RawData:
    """One of the image sets from NAME.npz."""
    raw = read_npz(path)
    if verify:
        for part, expected in zip(raw.test, _IMAGE_DIGESTS[name], strict=True):
            found = hashlib.sha256(part.astype("uint8").tobytes()).hexdigest()
            if found != expected:
                raise ValueError(
                    f"{path} is not {name}: its test samples have the SHA-256 "
                    f"{found[:12]}..., expected {expected[:12]}... Pass "
                    "`verify=False` to use it all the same."
                )
    return raw


def read_uci(path: pathlib.Path) -> RawData:
    """One of the UCI sets, standardised already.

    A feature that is constant in the training rows is NaN there (0 / 0) and
    becomes 0, as in the paper's code.
    """
    raw = read_npz(path, missing="zero")
    return RawData(raw.train, raw.test, source=raw.source, standardized=True)


def read_table(source: Any, options: TableOptions) -> RawData:
    """A data frame, a dict of columns or a CSV file, split 80/20.

    Args:
        source: as in `keras_rub.datasets.cells.read_cells`.
        options: what the user says about the table.
    """
    where = "The table" if is_frame(source) else str(source)
    label = options.label
    if label is None:
        label = _last_column(source, options.ignore)
    cells = read_cells(source, {label, *options.categories}, options.ignore)
    if label not in cells:
        raise ValueError(
            f"{where} has no column {label!r} for `label`. Its columns: "
            f"{list(cells)}"
        )
    answers = cells.pop(label)
    options.require_columns(list(cells), where)
    if len(answers) < _FEWEST_ROWS:
        raise ValueError(
            f"{where}: a header and at least {_FEWEST_ROWS} rows are needed. "
            f"Received: {len(answers)} rows"
        )
    if options.missing == "drop":
        whole = ~answers.missing
        for found in cells.values():
            whole &= ~found.missing
        answers = answers.take(whole)
        cells = {name: found.take(whole) for name, found in cells.items()}
        if len(answers) < _FEWEST_ROWS:
            raise ValueError(
                f'{where} has {len(answers)} rows left after `missing="drop"`.'
            )
    y, classes = _classes(answers, where)
    if options.missing == "error":
        _require_numbers(cells, where)
    rows = _split(np.arange(len(y)), y, source="")
    first = rows.train[0][: training_rows(len(rows.train[0]))]
    schema = Schema.fit(cells, first, options)
    # Encoded as a whole: an error then counts all rows.
    x = schema.encode(cells)
    return RawData(
        train=(x[rows.train[0]], rows.train[1]),
        test=(x[rows.test[0]], rows.test[1]),
        source="a data frame"
        if is_frame(source)
        else pathlib.Path(source).name,
        feature_names=schema.feature_names,
        class_names=classes,
        schema=schema,
        options=options.replace(label=label),
    )


def _last_column(source, ignore) -> str:
    names = [name for name in column_names(source) if name not in ignore]
    if not names:
        raise ValueError("A table needs a column for the label.")
    return names[-1]


def _classes(answers: Cells, where) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers [n], and the names of the classes in order."""
    answers = answers.as_words()
    if answers.missing.any():
        raise ValueError(
            f"{where}: column {answers.name!r} must hold a class in every row. "
            f"Received: {int(answers.missing.sum())} rows without one"
        )
    used = np.unique(answers.values)
    classes = sorted((answers.words[code] for code in used), key=natural_order)
    if len(classes) < 2:
        raise ValueError(
            f"{where}: column {answers.name!r} must hold at least two classes. "
            f"Received: {classes}"
        )
    if len(classes) > max(_MANY_CLASSES, len(answers) // 4):
        raise ValueError(
            f"{where}: column {answers.name!r} must hold classes, not "
            f"measurements or names. Received: {len(classes)} different "
            f"values in {len(answers)} rows"
        )
    place = {word: number for number, word in enumerate(classes)}
    table = np.array([place.get(word, -1) for word in answers.words])
    return table[answers.values], tuple(classes)


def _require_numbers(cells, where) -> None:
    """Raises one line about all numbers that are missing."""
    gaps = {
        name: int(found.missing.sum())
        for name, found in cells.items()
        if found.words is None and found.missing.any()
    }
    if gaps:
        raise ValueError(
            f"{where} holds {sum(gaps.values())} missing, NaN or infinite "
            f"values, in {', '.join(gaps)}. Choose how to deal with them: "
            '`missing="drop"`, `missing="mean"` or `missing="median"`.'
        )


def read_tfds(name: str, data_dir: str | os.PathLike | None = None) -> RawData:
    """One of the image sets by tensorflow-datasets, which keeps a cache."""
    try:
        import tensorflow_datasets as tfds
    except Exception as error:  # of its protocol buffers, beside an older one
        raise ValueError(
            f"Data set {name!r} needs tensorflow-datasets, which can't be "
            "imported. Beside TensorFlow before 2.20 install "
            f'"tensorflow-metadata<1.17". ({error})'
        ) from error

    def split(part):
        found = tfds.as_numpy(builder.as_dataset(split=part, batch_size=-1))
        x, y = np.asarray(found["image"]), np.asarray(found["label"])
        return (x[..., 0] if x.shape[-1] == 1 else x), y

    builder = tfds.builder(name, data_dir=data_dir)
    if not builder.is_prepared():
        _require_network(name, builder)
        try:
            builder.download_and_prepare()
        except Exception as error:  # whatever the many hosts answer
            raise ValueError(_no_download(name, error)) from error
    return RawData(split("train"), split("test"), source="tensorflow-datasets")


def _require_network(name, builder) -> None:
    """Fails fast: tensorflow-datasets takes minutes to find out."""
    if any(key.lower().endswith("_proxy") for key in os.environ):
        return
    hosts = {urllib.parse.urlparse(url).hostname for url in builder.url_infos}
    for host in hosts - {None}:
        try:
            socket.create_connection((host, 443), timeout=5).close()
        except OSError as error:
            raise ValueError(_no_download(name, error)) from error


def _no_download(name, error) -> str:
    return (
        f"Data set {name!r} is not on this machine and can't be downloaded "
        f"({error}). Put {name}.npz (arrays {', '.join(_ARRAYS)}) in a folder "
        "and name that by `data_dir`, --data_dir or the environment variable "
        f"{ENVIRONMENT_VARIABLE}."
    )


def _split(x, y, **about) -> RawData:
    """80/20, stratified where each class allows; the same way each time."""
    from sklearn.model_selection import train_test_split  # slow to import

    counts = np.bincount(y)
    rest_x, test_x, rest_y, test_y = train_test_split(
        x,
        y,
        test_size=0.2,
        stratify=y if counts.min() >= 5 else None,
        random_state=0,
    )
    return RawData((rest_x, rest_y), (test_x, test_y), **about)


def _handle_missing(path, train, test, missing):
    """Deals with NaN and infinity in both parts as asked."""
    (x, y), (test_x, test_y) = train, test
    if np.issubdtype(x.dtype, np.integer):
        return train, test
    bad = int(np.sum(~np.isfinite(x)) + np.sum(~np.isfinite(test_x)))
    if not bad:
        return train, test
    if missing == "error":
        raise ValueError(
            f"{path} holds {bad} missing, NaN or infinite values. Choose how "
            'to deal with them: `missing="drop"` or `missing="mean"`.'
        )
    if missing == "drop":
        keep = np.isfinite(x.reshape(len(x), -1)).all(axis=1)
        test_keep = np.isfinite(test_x.reshape(len(test_x), -1)).all(axis=1)
        return (x[keep], y[keep]), (test_x[test_keep], test_y[test_keep])
    fill = np.zeros(x.shape[1:])
    if missing == "mean":
        known = np.where(np.isfinite(x), x, np.nan)
        with np.errstate(all="ignore"):
            fill = np.nan_to_num(np.nanmean(known, axis=0))
    return tuple(
        (np.where(np.isfinite(part), part, fill), labels)
        for part, labels in (train, test)
    )
