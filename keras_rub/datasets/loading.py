"""One door to all data sets."""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_rub.datasets import sources
from keras_rub.datasets.cells import is_frame
from keras_rub.datasets.dataset import NORMALIZATIONS, Dataset, prepare
from keras_rub.datasets.schema import TableOptions


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
    name: Any,
    data_dir: str | os.PathLike | None = None,
    *,
    normalization: str = "default",
    label: str | None = None,
    categories: Sequence[str] | Mapping[str, Any] = (),
    ordinal: Sequence[str] | Mapping[str, Any] = (),
    immutable: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    ignore: Sequence[str] = (),
    missing: str = "error",
    unseen: str = "error",
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

    In a table of your own, a data frame or a CSV file, columns of words and
    booleans become groups of one-hot inputs, one a category; dates are
    refused. Categories, scaling and what stands for a missing number come
    from the training rows. What is said of the columns makes the attacker
    `Dataset.perturbations`.

    Args:
        name: one of `names()`; the path of an `.npz` file (arrays `x_train`,
            `y_train`, `x_test`, `y_test`) or a `.csv` file with a header; a
            pandas DataFrame, or a dict of columns.
        data_dir: the data folder. Defaults to `None`, the environment
            variable `KERAS_RUB_DATA`.
        normalization: `"unit"` scales to [0, 1]; `"standard"` standardises:
            a table with the statistics of its training rows, images one by
            one and channel by channel; `"none"` leaves the raw values;
            `"inside"` leaves those of a table too, to be standardised by
            `Dataset.preprocessing` inside the model, and counts radii in
            standard deviations, by the weights of `Dataset.perturbations`.
            Defaults to `"default"`: unit for images and digits, standard for
            tables of numbers, inside for tables with other columns.
        label: name of the column of a table that holds the classes. Defaults
            to `None`, the last column.
        categories: names of columns of a table that hold categories though
            they look like numbers. As a dict also prices: from the name to
            what a switch takes of the radius, a number or a table
            `{from: {to: price}}`; switches that are not named cost 1, and
            infinity forbids one. Columns of words and booleans need not be
            named. Defaults to none.
        ordinal: names of columns that an attacker moves in whole steps:
            whole numbers, or words, whose order is given by a dict
            `{name: [lowest, ..., highest]}`. Defaults to none but the ordered
            categories of a DataFrame.
        immutable: names of columns that an attacker can't change. Defaults
            to none.
        weights: dict from the name of a column of numbers to the cost of
            moving it by one unit of the radius. Defaults to `None`, 1 each.
        ranges: dict from the name of a column of numbers to the raw values
            (low, high) that an attacker can't leave. Defaults to `None`.
        ignore: names of columns of a table that are no features. Defaults to
            none.
        missing: what to do about missing, NaN and infinite numbers in your
            own tables: `"error"`; `"drop"` the row; fill in the `"mean"` of
            the training rows; or their `"median"`, with one more input, that
            an attacker can't change, to say that the number is missing. A
            missing category is a category, unless the row is dropped.
            Defaults to `"error"`.
        unseen: what to do about a category that no training row has:
            `"error"`, or `"other"`: a category for those, and for all that
            fewer than 5 training rows have. Defaults to `"error"`.
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
    options = TableOptions(
        label=label,
        categories=categories,
        ordinal=ordinal,
        immutable=immutable,
        weights=weights or {},
        ranges=ranges or {},
        ignore=ignore,
        missing=missing,
        unseen=unseen,
    )
    if is_frame(name):
        raw = sources.read_table(name, options)
        return prepare("frame", raw, normalization, validation_images)
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(
            "`name` must be the name of a data set, a path, a pandas "
            f"DataFrame or a dict of columns. Received: {type(name).__name__}"
        )
    raw = _read(str(name), data_dir, options, verify)
    if raw.schema is None and options.replace(missing="error"):
        said = ", ".join(options.replace(missing="error").to_dict())
        raise ValueError(
            f"Only a data frame or a CSV file takes {said}. "
            f"Received: `name={str(name)!r}`"
        )
    return prepare(str(name), raw, normalization, validation_images)


def _read(name, data_dir, options, verify):
    if name.endswith((".npz", ".csv")):
        path = pathlib.Path(name).expanduser()
        if not path.exists():
            raise ValueError(f"The data file {path} does not exist.")
        if name.endswith(".csv"):
            return sources.read_table(path, options)
        return sources.read_npz(path, options.missing)
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
        return sources.read_table(table, options)
    raise ValueError(
        f"Data set {name!r} is not in {folder}: neither {path} nor "
        f"{table.name} exists."
    )
