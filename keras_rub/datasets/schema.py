"""What the inputs of a network are, in the columns of a table."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_rub.datasets.cells import (
    Cells,
    Words,
    column_names,
    read_cells,
    word_of,
)

MISSING_RULES = ("error", "drop", "mean", "median")
UNSEEN_RULES = ("error", "other")

MISSING = "(missing)"  # the category of cells that hold nothing
OTHER = "(other)"  # of values that few or no training rows have

_FEW_ROWS = 5  # a category of fewer training rows is pooled with the others
_MANY_VALUES = 50  # more of them are no category, unless it is said
_SAME = 0.999  # share of equal training rows in a nearly constant column
_FLAT = 1e-6  # deviation, as a part of the mean
_SHOWN = 5  # values that an error names


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """What a user says about a table; arguments of `keras_rub.datasets.load`.

    Attributes:
        label: name of the column with the classes, or `None`, the last.
        categories: names of columns with categories; as a dict, the price of
            a switch for each: a number, or `{from: {to: price}}`.
        ordinal: names of columns of whole steps; as a dict, for each the
            words in their order, or `None` for numbers.
        immutable: names of columns that an attacker can't change.
        weights: from the name of a column to the cost of moving it by one.
        ranges: from the name of a column to its valid values (low, high).
        ignore: names of columns that are no features.
        missing: one of `MISSING_RULES`.
        unseen: one of `UNSEEN_RULES`.
    """

    label: str | None = None
    categories: Sequence[str] | Mapping[str, Any] = ()
    ordinal: Sequence[str] | Mapping[str, Any] = ()
    immutable: Sequence[str] = ()
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignore: Sequence[str] = ()
    missing: str = "error"
    unseen: str = "error"

    def __post_init__(self):
        for name, known in (
            ("missing", MISSING_RULES),
            ("unseen", UNSEEN_RULES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` must be one of {known}. "
                    f"Received: `{name}={getattr(self, name)!r}`"
                )
        for name in ("categories", "ordinal", "immutable", "ignore"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(
                isinstance(word, str) for word in value
            ):
                raise TypeError(
                    f"`{name}` must be a list of names of columns. "
                    f"Received: `{name}={value!r}`"
                )
        for name in ("weights", "ranges"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"`{name}` must be a dict by names of columns. "
                    f"Received: `{name}={value!r}`"
                )
        both = sorted(set(self.categories) & set(self.ordinal))
        if both:
            raise ValueError(
                f"Column {both[0]!r} can't be in `categories` and in `ordinal`."
            )

    def __bool__(self) -> bool:
        return bool(self.to_dict())

    def replace(self, **parts: Any) -> TableOptions:
        """A copy in which the attributes named have other values."""
        return dataclasses.replace(self, **parts)

    @property
    def prices(self) -> dict[str, Any]:
        """The price of a switch, for the categories that have one."""
        if not isinstance(self.categories, Mapping):
            return {}
        return {k: v for k, v in self.categories.items() if v is not None}

    @property
    def levels(self) -> dict[str, list[str]]:
        """The words of the ordinal columns that hold words, in order."""
        if not isinstance(self.ordinal, Mapping):
            return {}
        return {
            name: [word_of(word) for word in words]
            for name, words in self.ordinal.items()
            if words is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """What was said, ready for JSON; nothing where nothing was."""

        def plain(value):
            if isinstance(value, Mapping):
                return {str(key): plain(item) for key, item in value.items()}
            if isinstance(value, (str, int, float)) or value is None:
                return value
            if isinstance(value, np.generic):
                return value.item()
            return [plain(item) for item in value]

        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) not in ((), {}, [], None)
            and not (
                field.name in ("missing", "unseen")
                and getattr(self, field.name) == "error"
            )
        }

    def require_columns(self, names: Sequence[str], where: str) -> None:
        """Raises if a column that is spoken of is not there."""
        for argument in (
            "categories", "ordinal", "immutable", "weights", "ranges",
        ):  # fmt: skip
            absent = [n for n in getattr(self, argument) if n not in names]
            if absent:
                raise ValueError(
                    f"{where} has no column {absent[0]!r} for `{argument}`. "
                    f"Its columns: {list(names)}"
                )


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table, and the inputs that stand for it.

    Attributes:
        name: of the column.
        kind: `"number"`, `"ordinal"` (whole steps) or `"category"`.
        start: the first of its inputs.
        values: the categories, one input each; or the words of an ordinal
            column, in order; else nothing.
        filled: what stands for a missing number, or `None`: none may be.
        indicated: whether one more input says that a number is missing.
        immutable: whether an attacker can't change it.
        weight: the cost of moving it by one.
        range: the valid values, or `None`.
        price: of a switch: a number, or `{from: {to: price}}`.
    """

    name: str
    kind: str
    start: int
    values: tuple[str, ...] = ()
    filled: float | None = None
    indicated: bool = False
    immutable: bool = False
    weight: float = 1.0
    range: tuple[float, float] | None = None
    price: Any = 1.0

    @property
    def size(self) -> int:
        """How many inputs stand for it."""
        if self.kind == "category":
            return len(self.values)
        return 1 + self.indicated

    @property
    def inputs(self) -> slice:
        """Its inputs."""
        return slice(self.start, self.start + self.size)

    @property
    def input_names(self) -> tuple[str, ...]:
        """A name for each of its inputs."""
        if self.kind == "category":
            return tuple(f"{self.name}={value}" for value in self.values)
        flag = (f"{self.name} is missing",) if self.indicated else ()
        return (self.name, *flag)

    def read(self, inputs: np.ndarray) -> float | str | None:
        """What its inputs [size] say, in the words of the table.

        Returns:
            A number, a word, or `None` for a missing number.
        """
        if self.kind == "category":
            return self.values[int(np.argmax(inputs))]
        if self.indicated and inputs[1] > 0.5:
            return None
        value = float(inputs[0])
        if self.kind == "number":
            return value
        if not self.values:
            return round(value)
        return self.values[int(np.clip(round(value), 0, len(self.values) - 1))]


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a table, as a network sees them.

    It is fitted to training rows: which categories there are, and what stands
    for a missing number.

    Attributes:
        columns: in the order of the inputs.
        unseen: `"error"` or `"other"`, what becomes of a category that no
            training row has.
    """

    columns: tuple[Column, ...]
    unseen: str = "error"

    @classmethod
    def fit(
        cls, cells: Mapping[str, Cells], rows: np.ndarray, options: TableOptions
    ) -> Schema:
        """The schema of a table.

        Args:
            cells: the columns but the label.
            rows: numbers of the training rows.
            options: what the user said.
        """
        columns: list[Column] = []
        flat = []
        for name, found in cells.items():
            start = columns[-1].inputs.stop if columns else 0
            known = found.take(rows)
            column = _fit(known, found, start, options)
            columns.append(column)
            if _hardly_varies(known):
                flat.append(name)
        if not columns:
            raise ValueError("A table needs a column beside the label.")
        if flat:
            warnings.warn(
                f"Hardly varying in the training rows: {', '.join(flat)}. A "
                "column that is nearly constant tells little, and a radius in "
                "its standard deviations is next to nothing in raw units: "
                "leave it out by `ignore`, or fix it by `immutable`.",
                stacklevel=5,
            )
        return cls(tuple(columns), options.unseen)

    @property
    def size(self) -> int:
        """M, the number of inputs."""
        return self.columns[-1].inputs.stop

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each input."""
        return tuple(n for column in self.columns for n in column.input_names)

    @property
    def scaled(self) -> np.ndarray:
        """Boolean array [M]: the inputs that are numbers to be scaled."""
        scaled = np.zeros(self.size, bool)
        for column in self.columns:
            scaled[column.start] = column.kind != "category"
        return scaled

    @property
    def has_categories(self) -> bool:
        """Whether some column is no plain number."""
        return bool(self.names_of("category", "ordinal"))

    def names_of(self, *kinds: str) -> list[str]:
        """The names of the columns of these kinds."""
        return [column.name for column in self.columns if column.kind in kinds]

    def encode(self, table: Any) -> np.ndarray:
        """The inputs of rows, in raw units.

        Args:
            table: a pandas DataFrame, a dict of columns, or the path of a CSV
                file; columns that the schema does not know are left out.

        Returns:
            Float64 array [n, M].
        """
        words = [c.name for c in self.columns if c.values]
        cells = table
        if not (isinstance(table, Mapping) and all(
            isinstance(found, Cells) for found in table.values()
        )):  # fmt: skip
            cells = _known_cells(table, [c.name for c in self.columns], words)
        count = len(next(iter(cells.values())))
        x = np.zeros((count, self.size))
        for column in self.columns:
            _encode(
                column, cells[column.name], x[:, column.inputs], self.unseen
            )
        return x

    def decode(self, x: np.ndarray) -> list[dict[str, Any]]:
        """What rows of inputs [n, M] in raw units say, by column."""
        return [
            {
                column.name: column.read(row[column.inputs])
                for column in self.columns
            }
            for row in np.asarray(x)
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """The columns, ready for JSON: what a client needs to encode rows."""
        return [
            {
                key: value
                for key, value in {
                    "name": column.name,
                    "kind": column.kind,
                    "inputs": [column.start, column.inputs.stop],
                    "values": list(column.values),
                    "filled": column.filled,
                    "immutable": column.immutable,
                }.items()
                if not (value is None or value is False or value == [])
            }
            for column in self.columns
        ]


def _known_cells(table, names, words) -> dict[str, Cells]:
    """The cells of new rows, whose other columns may hold anything."""
    given = column_names(table)
    absent = [name for name in names if name not in given]
    if absent:
        raise ValueError(
            f"The table has no column {absent[0]!r}. Its columns: {given}"
        )
    return read_cells(table, words, [n for n in given if n not in names])


# Fitting ---------------------------------------------------------------------


def _fit(
    known: Cells, found: Cells, start: int, options: TableOptions
) -> Column:
    """The column that training rows (`known`) of a table make."""
    name = found.name
    common: dict[str, Any] = {
        "name": name,
        "start": start,
        "immutable": name in options.immutable,
        "weight": _positive(name, options.weights.get(name, 1.0)),
    }
    if known.missing.all():
        raise ValueError(
            f"Column {name!r} holds no value in the training rows: leave it "
            "out by `ignore`."
        )
    if name in options.ordinal or found.ordered:
        return _fit_ordinal(known, found, common, options)
    if found.words is None and name not in options.categories:
        low_high = _range(name, options.ranges.get(name), found)
        return Column(
            kind="number", range=low_high, **common, **_filling(known, options)
        )
    for argument in ("ranges", "weights"):
        if name in getattr(options, argument):
            raise ValueError(
                f"`{argument}` is for numbers, but column {name!r} holds "
                "categories; the price of a switch stands in `categories`."
            )
    values = _values(known.as_words(), name in options.categories, options)
    return Column(
        kind="category",
        values=values,
        price=_price(name, options.prices.get(name, 1.0), values),
        **common,
    )


def _fit_ordinal(known, found, common, options) -> Column:
    name = found.name
    levels = options.levels.get(name)
    if levels is None and found.ordered:
        levels = list(found.words)
    if levels is None:
        if found.words is not None:
            raise ValueError(
                f"Column {name!r} holds words, so `ordinal` must give their "
                "order: {name: [lowest, ..., highest]}. "
                f"Received: words such as {list(found.words[:_SHOWN])}"
            )
        broken = found.values[np.isfinite(found.values)]
        broken = broken[broken != np.round(broken)]
        if len(broken):
            raise ValueError(
                f"Column {name!r} of `ordinal` must hold whole numbers. "
                f"Received: {broken[0]:g}"
            )
        low_high = _range(name, options.ranges.get(name), found)
        return Column(
            kind="ordinal", range=low_high, **common, **_filling(known, options)
        )
    if len(set(levels)) < max(len(levels), 2):
        raise ValueError(
            f"`ordinal` must give column {name!r} two or more words, each "
            f"once. Received: {levels}"
        )
    known = _levels(known, levels)
    return Column(
        kind="ordinal",
        values=tuple(levels),
        range=(0.0, len(levels) - 1.0),
        **common,
        **_filling(known, options),
    )


def _levels(cells: Cells, levels) -> Cells:
    """Words of an ordinal column as the numbers of their steps."""
    cells = cells.as_words()
    unknown = [word for word in cells.words if word not in levels]
    used = set(np.unique(cells.values)) - {-1}
    unknown = [w for w in unknown if cells.words.index(w) in used]
    if unknown:
        raise ValueError(
            f"Column {cells.name!r} holds {unknown[0]!r}, which is none of "
            f"its steps {list(levels)}."
        )
    steps = [
        float(levels.index(w)) if w in levels else np.nan for w in cells.words
    ]
    return Cells(cells.name, values=np.array([*steps, np.nan])[cells.values])


def _filling(known, options) -> dict[str, Any]:
    """What stands for a missing number, by the rule asked for."""
    if options.missing not in ("mean", "median"):
        return {}
    there = known.values[~known.missing]
    middle = np.mean(there) if options.missing == "mean" else np.median(there)
    if known.name in options.ordinal:
        middle = np.round(middle)
    indicated = options.missing == "median" and bool(known.missing.any())
    return {"filled": float(middle), "indicated": indicated}


def _values(known: Words, named: bool, options) -> tuple[str, ...]:
    """The categories of the training rows, in order."""
    counts = np.bincount(known.values + 1, minlength=len(known.words) + 1)
    found = {
        word: count
        for word, count in zip(known.words, counts[1:], strict=True)
        if count
    }
    kept = [
        word
        for word, count in found.items()
        if options.unseen == "error" or count >= _FEW_ROWS
    ]
    if len(kept) > _MANY_VALUES and not named:
        examples = ", ".join(repr(word) for word in kept[:3])
        raise ValueError(
            f"Column {known.name!r} holds {len(kept)} different words "
            f"({examples}, ...), too many for categories. Leave it out by "
            "`ignore`, turn it into numbers, or name it in `categories`."
        )
    values = sorted(kept, key=natural_order)
    if counts[0]:
        values.append(MISSING)
    if options.unseen == "other":
        values.append(OTHER)
    return tuple(values)


def natural_order(word: str) -> tuple[int, float, str]:
    """A key for sorting: numbers by value, words by the alphabet."""
    try:
        return (0, float(word), "")
    except ValueError:
        return (1, 0.0, word)


def _hardly_varies(known: Cells) -> bool:
    there = ~known.missing
    values = known.values[there]
    _, counts = np.unique(values, return_counts=True)
    if counts.max() > _SAME * len(known):
        return True
    if known.words is not None:
        return False
    return bool(values.std() <= _FLAT * np.abs(values.mean()))


def _positive(name, weight) -> float:
    try:
        value = float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"`weights` must be finite and above 0; use `immutable` for a "
            f"column that can't change. Received: {weight!r} for {name!r}"
        )
    return value


def _range(name, given, found: Cells) -> tuple[float, float] | None:
    if given is None:
        return None
    try:
        low, high = (float(end) for end in given)
        if not low < high:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            "`ranges` must be pairs (low, high) with low < high. "
            f"Received: {given!r} for {name!r}"
        ) from None
    there = found.values[~found.missing]
    outside = there[(there < low) | (there > high)]
    if len(outside):
        raise ValueError(
            f"Column {name!r} holds {outside[0]:g}, outside its `ranges` "
            f"({low:g}, {high:g})."
        )
    return low, high


def _price(name, price, values) -> Any:
    """The price of a switch: a number, or by names of the categories."""
    if isinstance(price, Mapping):
        table = {
            word_of(a): {word_of(b): float(p) for b, p in row.items()}
            for a, row in price.items()
        }
        named = [*table, *(b for row in table.values() for b in row)]
        unknown = [word for word in named if word not in values]
        if unknown:
            raise ValueError(
                f"The price of a switch of {name!r} names {unknown[0]!r}, "
                f"which is none of its categories {list(values)}."
            )
        numbers = [p for row in table.values() for p in row.values()]
    else:
        table = price
        numbers = [price]
    for number in numbers:
        if not isinstance(number, (int, float)) or not number > 0:
            raise ValueError(
                f"The price of a switch must be above 0 (`inf` for one that "
                f"can't be made). Received: {number!r} for {name!r}"
            )
    return table


# Encoding --------------------------------------------------------------------


def _encode(column: Column, cells: Cells, out: np.ndarray, unseen: str) -> None:
    """Writes the inputs [n, size] of one column."""
    if column.kind == "category":
        places = _places(column, cells.as_words(), unseen)
        out[np.arange(len(out)), places] = 1.0
        return
    if column.values:
        cells = _levels(cells, column.values)
    elif cells.words:
        raise ValueError(
            f"Column {column.name!r} must hold numbers. "
            f"Received: {cells.words[0]!r}"
        )
    missing = cells.missing
    if missing.any() and column.filled is None:
        raise ValueError(
            f"Column {column.name!r} holds {int(missing.sum())} missing or "
            'infinite values. Choose how to deal with them: `missing="drop"`, '
            '`missing="mean"` or `missing="median"`.'
        )
    # Cells that are all missing may pass for words.
    out[:, 0] = np.where(missing, column.filled or 0.0, cells.values)
    if column.indicated:
        out[:, 1] = missing


def _places(column, cells: Words, unseen: str) -> np.ndarray:
    """The number of each cell's category [n]."""
    place = {value: i for i, value in enumerate(column.values)}
    other = place.get(OTHER, -1)
    table = [place.get(word, other) for word in (*cells.words, MISSING)]
    found = np.array(table)[cells.values]
    lost = np.flatnonzero(found < 0)
    if len(lost):
        words = dict.fromkeys(
            (*cells.words, MISSING)[code] for code in cells.values[lost]
        )
        shown = ", ".join(repr(word) for word in list(words)[:_SHOWN])
        raise ValueError(
            f"Column {column.name!r} holds {shown}, which no training row has "
            f"({len(lost)} rows). Leave these rows out, or give such values a "
            'category of their own: `unseen="other"`.'
        )
    return found
