"""Columns of a data frame, of a dict or of a CSV file, as plain arrays."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import decimal
import numbers
import os
import re
from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

EXTRA = "pip install 'keras-rub[pandas]'"

# A file can't tell a missing value from these words.
_EMPTY = frozenset(("", "?", "na", "n/a", "nan", "null", "none", "<na>", "nat"))
_TRUTHS = {"true": "True", "false": "False"}
_DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}([T ].*)?|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}( .*)?"
)
# Below this share of words among numbers, the words are taken for slips.
_SLIPS = 0.05
_CHUNK = 10_000  # lines of a file that are held as text


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one column: numbers, or words.

    Attributes:
        name: of the column.
        values: of numbers a float64 array [n], NaN where a cell is missing;
            of words an int array [n], the place of each among `words`, -1
            where a cell is missing.
        words: the words, or `None` for numbers.
        ordered: whether the words are in an order of their own.
    """

    name: str
    values: np.ndarray
    words: tuple[str, ...] | None = None
    ordered: bool = False

    def __len__(self) -> int:
        return len(self.values)

    @property
    def missing(self) -> np.ndarray:
        """Boolean array [n]: which cells are missing or infinite."""
        if self.words is None:
            return ~np.isfinite(self.values)
        return self.values < 0

    def take(self, rows: np.ndarray) -> Cells:
        """Some of the rows, by a mask or by their numbers."""
        return dataclasses.replace(self, values=self.values[rows])

    def as_words(self) -> Words:
        """The same cells, each number as the word for it."""
        if self.words is not None:
            return Words(self.name, self.values, self.words, self.ordered)
        known = ~self.missing
        found, codes = np.unique(self.values[known], return_inverse=True)
        every = np.full(len(self), -1, "int32")
        every[known] = codes
        words = tuple(word_of(value) for value in found.tolist())
        return Words(self.name, every, words)


@dataclasses.dataclass(frozen=True, eq=False)
class Words(Cells):
    """Cells that are words for sure."""

    words: tuple[str, ...] = ()


def word_of(value: Any) -> str:
    """How a value is written: 3.0 as 3, or the next row with a gap differs."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def import_pandas(what: str) -> Any:
    """The module pandas, or an error that says what needs it."""
    try:
        import pandas
    except ImportError:
        raise ImportError(f"{what} needs pandas: {EXTRA}") from None
    return pandas


def is_frame(source: Any) -> bool:
    """Whether this is a data frame or a dict of columns, not a name."""
    return isinstance(source, Mapping) or (
        hasattr(source, "columns") and hasattr(source, "iloc")
    )


def column_names(source: Any) -> list[str]:
    """The names of the columns of what `read_cells` takes."""
    if is_frame(source):
        return [
            str(n) for n in (source if _is_dict(source) else source.columns)
        ]
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "A table must be a pandas DataFrame, a dict of columns or the path "
            f"of a CSV file. Received: {type(source).__name__}"
        )
    return [cell.strip() for cell in next(_rows(source), (0, []))[1]]


def read_cells(
    source: Any, words: Collection[str] = (), ignore: Collection[str] = ()
) -> dict[str, Cells]:
    """The columns of a table.

    Args:
        source: a pandas DataFrame, a dict from names to columns, or the path
            of a CSV file with a header.
        words: names of the columns whose cells are words even where they are
            written as numbers.
        ignore: names of the columns to leave out.

    Returns:
        From the name of each column to its cells.
    """
    names = column_names(source)
    if is_frame(source):
        return _of_frame(source, names, words, ignore)
    return _of_file(source, names, words, ignore)


# Data frames -----------------------------------------------------------------


def _of_frame(frame, names, words, ignore):
    _require_names("The table", names, ignore)
    columns = frame.values() if _is_dict(frame) else _series_of(frame)
    found = {
        name: _of_column(name, column, name in words)
        for name, column in zip(names, columns, strict=True)
        if name not in ignore
    }
    counts = {name: len(cells) for name, cells in found.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"The columns must have the same length. Received: {counts}"
        )
    return found


def _is_dict(frame) -> bool:
    return isinstance(frame, Mapping)


def _series_of(frame):
    # By place: a name may be any object.
    return (frame.iloc[:, place] for place in range(frame.shape[1]))


def _of_column(name, column, as_words) -> Cells:
    values: Any = column if hasattr(column, "dtype") else _plain_array(column)
    if getattr(values, "ndim", 1) != 1:
        raise ValueError(
            f"Column {name!r} must hold one value a row. "
            f"Received: shape {tuple(values.shape)}"
        )
    kind = getattr(values.dtype, "kind", "O")
    if hasattr(values.dtype, "categories") and hasattr(values, "cat"):
        found = Cells(
            name,
            values=np.asarray(values.cat.codes, "int32"),
            words=tuple(word_of(word) for word in values.dtype.categories),
            ordered=bool(values.dtype.ordered),
        )
        return _without_empty_words(found)
    if kind in "Mm":
        raise ValueError(_no_dates(name, str(values.dtype)))
    if kind in "iuf":
        if hasattr(values, "to_numpy"):
            values = values.to_numpy("float64", na_value=np.nan)
        found = Cells(name, values=np.asarray(values, "float64"))
        return found.as_words() if as_words else found
    if kind == "c":
        raise ValueError(
            f"Column {name!r} must hold numbers, words or booleans. "
            f"Received: dtype {values.dtype}"
        )
    return _of_objects(name, np.asarray(values, object).tolist(), as_words)


def _plain_array(column) -> np.ndarray:
    values = np.empty(len(column), object)
    values[:] = list(column)
    return values


def _of_objects(name, values, as_words) -> Cells:
    """Cells of any Python objects, if they are all of one kind."""
    kinds = set(map(type, values)) - {type(None)}
    kinds = {
        kind for kind in kinds if kind.__name__ not in ("NAType", "NaTType")
    }
    if any(issubclass(kind, (bool, np.bool_)) for kind in kinds):
        kinds.discard(float)  # NaN beside booleans
        alike = all(issubclass(kind, (bool, np.bool_)) for kind in kinds)
    elif kinds and all(
        issubclass(k, (numbers.Real, decimal.Decimal)) for k in kinds
    ):
        found = Cells(name, values=np.array([_as_float(v) for v in values]))
        return found.as_words() if as_words else found
    else:
        kinds.discard(float)
        alike = all(issubclass(kind, str) for kind in kinds)
    if any(issubclass(k, (datetime.date, datetime.timedelta)) for k in kinds):
        example = next(v for v in values if isinstance(v, datetime.date))
        raise ValueError(_no_dates(name, str(example)))
    if not alike and not (as_words and all(map(_is_plain, kinds))):
        raise ValueError(
            f"Column {name!r} must hold numbers, words or booleans, not "
            "several kinds; name it in `categories` if all are categories. "
            f"Received: {', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    return _coded(name, ["" if _is_gap(v) else word_of(v) for v in values])


def _is_plain(kind) -> bool:
    return issubclass(kind, (str, bool, np.bool_, numbers.Real))


def _is_gap(value) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def _as_float(value) -> float:
    return np.nan if _is_gap(value) else float(value)


def _without_empty_words(cells) -> Cells:
    """The same, a word for a missing value being a missing value."""
    if not any(word.lower() in _EMPTY for word in cells.words):
        return cells
    kept = [word for word in cells.words if word.lower() not in _EMPTY]
    places = [kept.index(w) if w in kept else -1 for w in cells.words] + [-1]
    return dataclasses.replace(
        cells, values=np.array(places, "int32")[cells.values], words=tuple(kept)
    )


def _coded(name, texts: Iterable[str]) -> Cells:
    codes, words = array("i"), dict[str, int]()
    _append(codes, words, texts)
    return _finished(name, codes, words)


def _append(codes, words, texts) -> None:
    """Adds the codes of more cells, and the words that are new."""
    for text in texts:
        text = text.strip()
        code = words.get(text)
        if code is None:
            code = -1 if text.lower() in _EMPTY else len(words)
            if code >= 0:
                words[text] = code
        codes.append(code)


def _finished(name, codes, words) -> Cells:
    found = Cells(
        name, np.frombuffer(codes, "int32").copy(), words=tuple(words)
    )
    if words and all(word.lower() in _TRUTHS for word in words):
        # However they are written: true in one file is True in the next.
        kept = sorted({_TRUTHS[word.lower()] for word in words})
        places = [kept.index(_TRUTHS[word.lower()]) for word in words] + [-1]
        found = Words(
            name,
            values=np.array(places, "int32")[found.values],
            words=tuple(kept),
        )
    if words and all(_DATE.fullmatch(word) for word in words):
        raise ValueError(_no_dates(name, next(iter(words))))
    return found


def _no_dates(name, example) -> str:
    return (
        f"Column {name!r} holds dates, which are no features: turn them into "
        "numbers, such as days since a day of your choice, or leave the column "
        f"out by `ignore`. Received: {example}"
    )


# Files -----------------------------------------------------------------------


def _of_file(path, header, words, ignore):
    """Numbers at the first reading; what is left as words at the second.

    The text of a large file takes many times the memory of its numbers, so no
    more than a chunk of it is held.
    """
    count = sum(1 for _ in _rows(path)) - 1
    if count < 1:
        raise ValueError(
            f"{path}: a header and rows are needed. Received: {count + 1} lines"
        )
    _require_names(path, header, ignore)
    wanted = [name for name in header if name not in ignore]
    found = {}
    slips: dict[str, _Slips] = {}
    for name in wanted:
        if name not in words:
            found[name] = np.empty(count)
            slips[name] = _Slips()
    place = {name: header.index(name) for name in wanted}
    for first, lines, columns in _chunks(path, len(header)):
        for name, numbers_ in list(found.items()):
            cells = columns[place[name]]
            numbers_[first : first + len(cells)] = slips[name].read(
                cells, lines
            )
    texts = [name for name in wanted if name not in found]
    for name, seen in slips.items():
        if seen.words:
            if seen.numbers and seen.words < _SLIPS * (
                seen.words + seen.numbers
            ):
                raise ValueError(
                    f"{path}, line {seen.line}: column {name!r} holds "
                    f"{seen.word!r} among numbers. Correct it, or name the "
                    "column in `categories`."
                )
            texts.append(name)
    coded = {name: (array("i"), dict[str, int]()) for name in texts}
    if texts:
        for _, _, columns in _chunks(path, len(header)):
            for name, (codes, known) in coded.items():
                _append(codes, known, columns[place[name]])
    return {
        name: _finished(name, *coded[name])
        if name in coded
        else Cells(name, values=found[name])
        for name in wanted
    }


class _Slips:
    """Reads cells as numbers and counts those that are none."""

    def __init__(self):
        self.numbers, self.words = 0, 0
        self.line, self.word = 0, ""

    def read(self, cells, lines) -> np.ndarray:
        try:
            found = np.array([float(cell) for cell in cells])
        except ValueError:
            found = np.array(
                [self._one(*pair) for pair in zip(cells, lines, strict=True)]
            )
        self.numbers += int(np.isfinite(found).sum())
        return found

    def _one(self, cell, line) -> float:
        try:
            return float(cell)
        except ValueError:
            if cell.strip().lower() not in _EMPTY:
                if not self.words:
                    self.line, self.word = line, cell.strip()
                self.words += 1
            return np.nan


def _rows(path):
    """Line numbers and cells of all rows but empty ones."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for row in reader:
                if row:
                    yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error


def _chunks(path, width):
    """The rows below the header: first row, lines, and columns of text."""
    rows = _rows(path)
    next(rows)
    first, lines, chunk = 0, [], []
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}, line {line}: {len(row)} cells, but the header has "
                f"{width}"
            )
        lines.append(line)
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield first, lines, list(zip(*chunk, strict=True))
            first += len(chunk)
            lines, chunk = [], []
    if chunk:
        yield first, lines, list(zip(*chunk, strict=True))


def _require_names(where, names, ignore) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{where} has two columns of the same name: {twice}")
    if "" in names:
        raise ValueError(
            f"{where}: column {names.index('') + 1} has no name. If it is the "
            "index of a data frame, write the file with `index=False`."
        )
    absent = sorted(set(ignore) - set(names))
    if absent:
        raise ValueError(
            f"{where} has no column {absent[0]!r} for `ignore`. Its columns: "
            f"{names}"
        )
