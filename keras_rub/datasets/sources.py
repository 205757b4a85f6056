"""Where data comes from: scikit-learn, tensorflow-datasets, files."""

from __future__ import annotations

import csv
import hashlib
import os
import pathlib
import socket
import urllib.parse

import numpy as np

from keras_rub.datasets.dataset import RawData

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
_MISSING = ("error", "drop", "mean")
_EMPTY_CELLS = ("", "?", "na", "nan", "null", "none")


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


def read_csv(
    path: pathlib.Path, label: str | None, missing: str = "error"
) -> RawData:
    """A table with a header; every column but the label must be numbers.

    Args:
        path: the file.
        label: name of the column with the classes; `None` for the last one.
        missing: what to do about empty cells: `"error"`, `"drop"` the row,
            or fill in the `"mean"` of the training rows.
    """
    if missing not in _MISSING:
        raise ValueError(
            f"`missing` must be one of {_MISSING}. "
            f"Received: `missing={missing!r}`"
        )
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error
    if len(rows) < 5:
        raise ValueError(
            f"{path}: a header and at least 4 rows are needed. "
            f"Received: {len(rows)} lines"
        )
    header, body = [cell.strip() for cell in rows[0]], rows[1:]
    label = header[-1] if label is None else label
    if label not in header:
        raise ValueError(
            f"{path} has no column {label!r} for `label`. Its columns: {header}"
        )
    ragged = next(
        (i for i, r in enumerate(body) if len(r) != len(header)), None
    )
    if ragged is not None:
        raise ValueError(
            f"{path}, line {ragged + 2}: {len(body[ragged])} cells, but the "
            f"header has {len(header)}"
        )
    where = header.index(label)
    columns = [name for name in header if name != label]
    x = np.array(
        [
            [
                _number(cell, path, line, header[column])
                for column, cell in enumerate(row)
                if column != where
            ]
            for line, row in enumerate(body, start=2)
        ]
    )
    answers = [row[where].strip() for row in body]
    classes = sorted(set(answers), key=_class_order)
    if len(classes) < 2:
        raise ValueError(
            f"{path}: column {label!r} must hold at least two classes. "
            f"Received: {classes}"
        )
    y = np.array([classes.index(answer) for answer in answers])
    if missing == "drop":
        whole = np.isfinite(x).all(axis=1)
        x, y = x[whole], y[whole]
    raw = _split(x, y, source=path.name, feature_names=tuple(columns))
    train, test = _handle_missing(path, raw.train, raw.test, missing)
    return RawData(train, test, raw.source, raw.feature_names, label=label)


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


def _number(cell, path, line, column) -> float:
    if cell.strip().lower() in _EMPTY_CELLS:
        return np.nan
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{path}, line {line}: column {column!r} holds {cell!r}, which is "
            "no number. Turn categories into 0/1 columns first."
        ) from None


def _class_order(answer):
    """Numbers by value, words by the alphabet."""
    try:
        return (0, float(answer), "")
    except ValueError:
        return (1, 0.0, answer)
