"""Flags that mean the same in every command that has them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

import keras_rub
from keras_rub import attacks, datasets
from keras_rub.attacks.suite import names_of
from keras_rub.bounds import methods
from keras_rub.cli import command
from keras_rub.cli.parsing import (
    parse_ends,
    parse_names,
    parse_pairs,
    parse_range,
)
from keras_rub.cli.saved_run import SavedRun
from keras_rub.datasets import schema

NORMS = ("1", "2", "inf")

_OF_TRAINING = " By default that of the training, if it is known."


# What is said about the columns of a table: the help, and how it is read.
_TABLE_FLAGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "categories": (
        "Columns of a CSV file that hold categories; words always do. With "
        "the price of a switch, if it is not 1: job=2,zip.",
        lambda text, flag: parse_pairs(text, flag, float),
    ),
    "ordinal": (
        "Columns that an attacker moves in whole steps; words with their "
        "order: rooms,grade=low:middle:high.",
        lambda text, flag: parse_pairs(
            text, flag, lambda word: word.split(":")
        ),
    ),
    "immutable": (
        "Columns that an attacker can't change, with commas.",
        parse_names,
    ),
    "weights": (
        "The cost of moving a column by one: income=2,age=5.",
        lambda text, flag: parse_pairs(text, flag, float, needed=True),
    ),
    "ranges": (
        "Values of a column that an attacker can't leave: age=0:120.",
        lambda text, flag: parse_pairs(text, flag, parse_ends, needed=True),
    ),
    "ignore": ("Columns that are no features, with commas.", parse_names),
}


class DataFlags:
    """--dataset, --data_dir, --normalization, and those about a table.

    Args:
        flag_values: the flags of the command.
        trained: bool. Whether the command takes a trained model, whose
            training decides then. Defaults to `True`.
        tables: bool. Whether the command knows the columns of tables.
            Defaults to `True`.
    """

    def __init__(
        self,
        flag_values: command.Flags,
        trained: bool = True,
        tables: bool = True,
    ):
        self._trained = trained
        later = _OF_TRAINING if trained else ""
        self._dataset = flag_values.string(
            "dataset",
            None if trained else "digits",
            "Name of the data set, or a .csv or .npz file." + later,
        )
        self._data_dir = flag_values.string(
            "data_dir",
            None,
            "Folder with NAME.npz files; the environment variable "
            "KERAS_RUB_DATA by default.",
        )
        self._label = flag_values.string(
            "label",
            None,
            "Column of a CSV file with the classes; the last by default."
            + later,
        )
        self._normalization = flag_values.choice(
            "normalization",
            None,
            datasets.NORMALIZATIONS,
            "Inputs in [0, 1] (unit), standardised (standard), raw (none), or "
            "raw with the radius in standard deviations (inside); default is "
            "unit for images, standard for tables of numbers and inside for "
            "tables with other columns." + later,
        )
        self._table = {}
        if tables:
            for flag, (text, _) in _TABLE_FLAGS.items():
                self._table[flag] = flag_values.string(flag, None, text + later)
            for flag, known, text in (
                ("missing", schema.MISSING_RULES, "numbers in a CSV file"),
                ("unseen", schema.UNSEEN_RULES, "categories in training rows"),
            ):
                self._table[flag] = flag_values.choice(
                    flag,
                    None,
                    known,
                    f"What to do about missing {text}." + later,
                )

    @property
    def name(self) -> str | None:
        """The data set asked for."""
        return self._dataset.value

    @property
    def data_dir(self) -> str | None:
        """The data folder asked for."""
        return self._data_dir.value

    @property
    def label(self) -> str | None:
        """The column asked for."""
        return self._label.value

    @property
    def normalization(self) -> str | None:
        """The normalization asked for."""
        return self._normalization.value

    @property
    def table(self) -> dict[str, Any]:
        """What is said about the columns, as `datasets.load` takes it."""
        return {
            name: _TABLE_FLAGS[name][1](flag.value, name)
            if name in _TABLE_FLAGS
            else flag.value
            for name, flag in self._table.items()
            if flag.value is not None
        }

    def check(self, settings: dict[str, Any]) -> None:
        """Raises if a flag contradicts the settings of the training."""
        said = schema.TableOptions(**self.table).to_dict()
        known = settings.get("table", {})
        for flag in said if "normalization" in settings else ():
            if said[flag] != known.get(flag):
                raise ValueError(
                    _contradiction(flag, known.get(flag), said[flag])
                )
        for flag, value, known in (
            ("dataset", _stem(self.name), _stem(settings.get("dataset"))),
            ("label", self.label, settings.get("label")),
            (
                "normalization",
                None if self.normalization == "default" else self.normalization,
                settings.get("normalization"),
            ),
        ):
            if None not in (value, known) and value != known:
                raise ValueError(_contradiction(flag, known, value))

    def load(self, settings: dict[str, Any] | None = None) -> datasets.Dataset:
        """The data set, in the units of the training.

        Args:
            settings: those of the training; empty or `None` where there are
                none.
        """
        settings = settings or {}
        self.check(settings)
        name = self.name or settings.get("dataset")
        if name is None:
            raise ValueError(
                "--dataset is needed, because nothing is known of the model's "
                "training (no config.json beside it)."
            )
        known = settings.get("normalization")
        data = datasets.load(
            name,
            self.data_dir,
            normalization=self.normalization or known or "default",
            label=self.label or settings.get("label"),
            **{**settings.get("table", {}), **self.table},
        )
        if known not in (None, data.normalization):
            raise ValueError(
                _contradiction("normalization", known, data.normalization)
            )
        return data


def define_model(flag_values: command.Flags) -> flags.FlagHolder:
    """--model."""
    return flag_values.string(
        "model",
        None,
        "A .keras file or a SavedModel folder. The settings of its training "
        "are read from config.json beside it, or from the SavedModel.",
    )


def define_norm(
    flag_values: command.Flags, default: str | None = None
) -> flags.FlagHolder:
    """--norm."""
    return flag_values.choice(
        "norm",
        default,
        NORMS,
        "Norm of the perturbation."
        + ("" if default else " By default that of the training, else 1."),
    )


def define_range(
    flag_values: command.Flags, default: str | None = None
) -> flags.FlagHolder:
    """--input_range."""
    return flag_values.string(
        "input_range",
        default,
        "The inputs that exist, which an attacker can't leave: LOW,HIGH, or "
        "data for the data set's own range, or none."
        + ("" if default else " By default as in the training, else none."),
    )


def define_attacks(
    flag_values: command.Flags, default: str
) -> flags.FlagHolder:
    """--attacks."""
    return flag_values.words(
        "attacks",
        default,
        "paper, strong, none, or names with commas: "
        + ", ".join(attacks.NAMES)
        + ".",
    )


def define_certificates(
    flag_values: command.Flags, default: str
) -> flags.FlagHolder:
    """--certificates."""
    return flag_values.choice(
        "certificates",
        default,
        ["none", *methods.names()],
        "How to certify each network.",
    )


def define_samples(
    flag_values: command.Flags, default: int, what: str
) -> flags.FlagHolder:
    """--samples."""
    return flag_values.whole(
        "samples",
        default,
        f"How many {what} samples, from the first.",
        lowest=1,
    )


def define_seed(flag_values: command.Flags, of: str) -> flags.FlagHolder:
    """--seed."""
    return flag_values.whole("seed", 0, f"Of {of}.", lowest=0)


def define_out(
    flag_values: command.Flags,
    default: str | None,
    text: str = "Folder for the results.",
) -> flags.FlagHolder:
    """--out."""
    return flag_values.string("out", default, text)


def attack_names(words: list[str]) -> str | list[str]:
    """The value of --attacks as `keras_rub.evaluate` takes it."""
    if words == ["none"]:
        return []
    if words in (["paper"], ["strong"]):
        return words[0]
    names_of(words)
    return words


def own_attacker(
    saved: SavedRun, data: datasets.Dataset | None
) -> keras_rub.PerturbationSet:
    """Whom a model is about: its own attacker, or else that of its table."""
    if saved.attacker is not None:
        return saved.attacker
    if data is not None and data.schema is not None:
        return data.perturbations
    return keras_rub.PerturbationSet(1)


def attackers(
    saved: SavedRun,
    norms: Sequence[int | str] | None,
    input_range: str | None,
    data: datasets.Dataset | None,
) -> list[keras_rub.PerturbationSet]:
    """Whom the figures speak of: the model's own attacker, or as asked.

    Args:
        saved: the model.
        norms: the norms asked for, or `None`.
        input_range: the value of --input_range, or `None`.
        data: the data set; it may be `None` if the range is not its own.

    Returns:
        One set a norm. Mask, weights and categories are always the model's
        own, or else those that follow from a table.
    """
    own = own_attacker(saved, data)
    found: Any = own.input_range
    if input_range is not None:
        found = parse_range(input_range, "input_range")
    if isinstance(found, str):
        if data is None:
            raise ValueError("--input_range=data needs a data set.")
        found = data.input_range
        if data.schema is not None:
            found = data.perturbations.input_range
        if found is None:
            raise ValueError(
                f"--input_range=data: data set {data.name} with the "
                f"normalization {data.normalization!r} has no valid range."
            )
    return [
        own.replace(norm=norm, input_range=found)
        for norm in norms or [own.norm]
    ]


def header(
    data: datasets.Dataset, found: list[keras_rub.PerturbationSet]
) -> str:
    """What the figures of a command are about."""
    return (
        f"data: {data.name}, normalization {data.normalization}\n"
        f"radius in units of: {data.units}\n"
        f"attacker: {'; '.join(map(str, found))}"
    )


def _contradiction(flag, known, value) -> str:
    return (
        f"--{flag} contradicts the model's training, which had {known}. Leave "
        f"it out, or train anew. Received: {value}"
    )


def _stem(name):
    """Files may have moved since the training: their names count."""
    if name is not None and name.endswith((".csv", ".npz")):
        return pathlib.Path(name).name
    return name
