"""One door to all data sets."""

from __future__ import annotations

import difflib
import os
import pathlib

from keras_rub.datasets import sources
from keras_rub.datasets.dataset import NORMALIZATIONS, Dataset, prepare


def names(data_dir: str | os.PathLike | None = None) -> list[str]:
    """The names that `load` knows.

    Embedded ones first, then the image sets, the paper's 46 UCI sets, and
    whatever else the data folder holds under `uci`. A UCI set with the name
    of an embedded one is listed as `uci/NAME`.
    """
    folder = sources.data_folder(data_dir)
    tables = set(sources.UCI)
    if folder is not None:
        for ending in ("npz", "csv"):
            tables |= {path.stem for path in folder.glob(f"uci/*.{ending}")}
    return [
        *sorted(sources.EMBEDDED),
        *sources.IMAGES,
        *sorted(f"uci/{n}" if n in sources.EMBEDDED else n for n in tables),
    ]


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    *,
    normalization: str = "default",
    label: str | None = None,
    missing: str = "error",
    validation_images: int = 1000,
    verify: bool = True,
) -> Dataset:
    """Loads a data set.

    Embedded sets (digits, iris, wine, breast_cancer) come with scikit-learn.
    Images (mnist, fashion_mnist, cifar10) come from `NAME.npz` of the data
    folder, else from tensorflow-datasets, which downloads them. The paper's
    UCI sets come from `uci/NAME.npz` or `uci/NAME.csv` of the data folder.
    Nothing is ever unpickled.

    Tables are split 80/20 into training and test rows where the source has
    no split of its own; the last quarter of the training rows is held out
    for validation. Of images the first `validation_images` are.

    Args:
        name: one of `names()`, or the path of an `.npz` file (arrays
            `x_train`, `y_train`, `x_test`, `y_test`) or a `.csv` file.
        data_dir: the data folder. Defaults to `None`, the environment
            variable `KERAS_RUB_DATA`.
        normalization: `"unit"` scales to [0, 1]; `"standard"` standardises:
            a table with the statistics of its training rows, images one by
            one and channel by channel; `"none"` leaves the raw values.
            Defaults to `"default"`: unit for images and digits, standard for
            tables.
        label: name of the column of a CSV file that holds the classes.
            Defaults to `None`, the last column.
        missing: `"error"`, `"drop"` or `"mean"`, what to do about empty
            cells and NaN in your own files. Defaults to `"error"`.
        validation_images: int. Images held out for validation. Defaults to
            `1000`.
        verify: bool. Whether to check `NAME.npz` of an image set against the
            known checksum. Defaults to `True`.

    Returns:
        A `Dataset`. Its `units` say what a radius of 1 means.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(
            f"`normalization` must be one of {NORMALIZATIONS}. "
            f"Received: `normalization={normalization!r}`"
        )
    raw = _read(str(name), data_dir, label, missing, verify)
    return prepare(str(name), raw, normalization, validation_images)


def _read(name, data_dir, label, missing, verify):
    if name.endswith((".npz", ".csv")):
        path = pathlib.Path(name).expanduser()
        if not path.exists():
            raise ValueError(f"The data file {path} does not exist.")
        if name.endswith(".csv"):
            return sources.read_csv(path, label, missing)
        return sources.read_npz(path, missing)
    if name in sources.EMBEDDED:
        return sources.read_embedded(name)
    folder = sources.data_folder(data_dir)
    known = names(data_dir)
    if name.removeprefix("uci/") not in (n.removeprefix("uci/") for n in known):
        near = difflib.get_close_matches(name, known, n=4)
        raise ValueError(
            f"Unknown data set {name!r}. "
            + (f"Near names: {near}. " if near else "")
            + "All names: keras_rub.datasets.names()."
        )
    if name in sources.IMAGES:
        if folder is not None and (folder / f"{name}.npz").exists():
            return sources.read_images(name, folder / f"{name}.npz", verify)
        return sources.read_tfds(name, folder)
    if folder is None:
        raise ValueError(
            f"Data set {name!r} needs a data folder with uci/{name}.npz or "
            f".csv: give it by `data_dir`, --data_dir or the environment "
            f"variable {sources.ENVIRONMENT_VARIABLE}. Without one there are "
            f"{sorted(sources.EMBEDDED)}."
        )
    stem = name.removeprefix("uci/")
    path = folder / "uci" / f"{stem}.npz"
    if path.exists():
        return sources.read_uci(path)
    table = path.with_suffix(".csv")
    if table.exists():
        return sources.read_csv(table, label, missing)
    raise ValueError(
        f"Data set {name!r} is not in {folder}: neither {path} nor "
        f"{table.name} exists."
    )
