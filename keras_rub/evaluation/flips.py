"""Who can flip which decision, by what change and at what price."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import keras
import numpy as np

from keras_rub import tables
from keras_rub.attacks import make
from keras_rub.attacks.attack import Attack
from keras_rub.bounds import certified_radius, certify
from keras_rub.datasets import Dataset
from keras_rub.datasets.cells import import_pandas, is_frame
from keras_rub.datasets.schema import Column
from keras_rub.perturbations import PerturbationSet, attacker_of, check_rho

_GROWTH = 2.0  # of the radius, from one attack to the next
_ROUNDS = 4  # attacks between the last radius that failed and the first win
_HALVINGS = 12  # of the moves that led to a win
_LEAST = 1e-3  # the smallest radius that is attacked
_SHOWN = 10  # rows that are printed


@dataclasses.dataclass(frozen=True)
class Change:
    """What happens to one column of a row.

    Attributes:
        column: its name.
        before: its value, in raw units or in the words of the table.
        after: its new value.
        price: what the change takes of the radius.
    """

    column: str
    before: float | str | None
    after: float | str | None
    price: float

    def __str__(self) -> str:
        return f"{self.column}: {_word(self.before)} -> {_word(self.after)}"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Flips:
    """For each row what is proved, and the cheapest change found.

    Attributes:
        predicted: names [n] of the classes that the model predicts.
        becomes: names [n] of the classes behind the changes; `""` where no
            change was found.
        certified: float array [n]. No change up to this price flips the
            decision.
        price: float array [n] of the cheapest change that was found;
            infinite where none was.
        changes: the changes of each row.
        columns: names of all columns.
        units: what a price of 1 means.
        attacker: whom the prices are about, in words.
    """

    predicted: np.ndarray
    becomes: np.ndarray
    certified: np.ndarray
    price: np.ndarray
    changes: tuple[tuple[Change, ...], ...]
    columns: tuple[str, ...]
    units: str
    attacker: str

    def __len__(self) -> int:
        return len(self.price)

    @property
    def gap(self) -> np.ndarray:
        """What lies between proof and attack [n]: the price of not knowing."""
        return self.price - self.certified

    @property
    def usage(self) -> dict[str, float]:
        """Share of the cheapest changes that a column is part of.

        The columns that are used most come first.
        """
        found = [row for row in self.changes if row]
        counts = dict.fromkeys(self.columns, 0)
        for row in found:
            for change in row:
                counts[change.column] += 1
        order = sorted(counts, key=lambda name: -counts[name])
        return {name: counts[name] / max(len(found), 1) for name in order}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row a sample."""
        return [
            {
                "row": number,
                "decision": str(self.predicted[number]),
                "certified": float(self.certified[number]),
                "price": _finite(self.price[number]),
                "gap": _finite(self.gap[number]),
                "becomes": str(self.becomes[number]),
                "changes": "; ".join(map(str, self.changes[number])),
            }
            for number in range(len(self))
        ]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table for readers: names of columns, and rows of cells."""
        rows = self.rows
        return tables.columns_of(rows), [
            [_cell(value) for value in row.values()] for row in rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "rows": [
                {
                    **row,
                    "changes": [
                        dataclasses.asdict(change) for change in changes
                    ],
                }
                for row, changes in zip(self.rows, self.changes, strict=True)
            ],
            "usage": self.usage,
            "columns": list(self.columns),
            "units": self.units,
            "attacker": self.attacker,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Flips:
        """What `to_dict` described."""
        rows = state["rows"]

        def floats(name):
            return np.array(
                [np.inf if row[name] is None else row[name] for row in rows]
            )

        return cls(
            predicted=np.array([row["decision"] for row in rows]),
            becomes=np.array([row["becomes"] for row in rows]),
            certified=floats("certified"),
            price=floats("price"),
            changes=tuple(
                tuple(Change(**change) for change in row["changes"])
                for row in rows
            ),
            columns=tuple(state["columns"]),
            units=state["units"],
            attacker=state["attacker"],
        )

    def to_json(self) -> str:
        """Everything as JSON; `from_dict(json.loads(...))` reads it."""
        return json.dumps(self.to_dict())

    def to_csv(self) -> str:
        """The table as CSV."""
        return tables.to_csv(self.rows)

    def to_frame(self) -> Any:
        """The table as a pandas DataFrame."""
        return import_pandas("`Flips.to_frame`").DataFrame(self.rows)

    def __repr__(self) -> str:
        header, cells = self.cells()
        left = (0, 1, 5, 6)
        found = np.isfinite(self.price)
        lines = [
            f"{len(self)} rows, of which {int(found.sum())} could be flipped",
            f"attacker: {self.attacker}",
            f"price in units of: {self.units}",
            tables.to_text(header, cells[:_SHOWN], left),
        ]
        if len(cells) > _SHOWN:
            lines.append(f"... and {len(cells) - _SHOWN} rows more")
        used = [
            f"{name} {tables.percent(share, 0)}"
            for name, share in self.usage.items()
            if share
        ]
        if used:
            lines.append(f"in the cheapest changes: {', '.join(used[:_SHOWN])}")
        return "\n".join(lines)


def flips(
    model: keras.Model,
    x: Any,
    *,
    data: Dataset | None = None,
    perturbations: PerturbationSet | None = None,
    method: str = "auto",
    attack: str | None = None,
    max_price: float = 1e3,
    tolerance: float = 0.01,
    batch_size: int = 256,
    seed: int = 0,
) -> Flips:
    """For each row the certified price and the cheapest change that flips it.

    It is the model's decision that is flipped, right or wrong. The price that
    is certified is that of `keras_rub.certified_radius`. From there on the row
    is attacked with a growing radius; what was found is then made cheaper, by
    further attacks below it, by taking back column after column, by putting
    one move in the place of all, and by shortening the moves, as long as the
    decision stays flipped. With `method="exact"` the counterexamples of the
    proof are tried too. The true price lies between both figures.

    Args:
        model: a robust model or any built Keras classifier of one input.
        x: array [n, M], or what `Dataset.encode` takes if `data` is given.
        data: the data set that the columns, units, categories and names of
            classes come from. Defaults to `None`: the columns have numbers.
        perturbations: the attacker. Defaults to `None`: that of a robust
            model, else that of `data`, else the L1 ball.
        method: of the certificate, as in `keras_rub.certify`. Defaults to
            `"auto"`.
        attack: one of `keras_rub.attacks.NAMES`. Defaults to `None`:
            `"switch"` where there are categories, else `"apgd-ce"`.
        max_price: float. Neither proofs nor attacks go beyond. Defaults to
            `1e3`.
        tolerance: as in `keras_rub.certified_radius`. Defaults to `0.01`.
        batch_size: int. Rows that are attacked together. Defaults to `256`.
        seed: int. Of the attack. Defaults to `0`.

    Returns:
        A `Flips`: printed, it is a table.

    Example:
    ```python
    data = keras_rub.datasets.load(frame, label="approved")
    ...
    print(keras_rub.flips(model, data.test[0][:20], data=data))
    ```
    """
    check_rho(max_price, "max_price")
    if data is not None and is_frame(x):
        x = data.encode(x)
    if perturbations is None and not hasattr(model, "perturbations"):
        perturbations = None if data is None else data.perturbations
    attacker = attacker_of(model, perturbations)
    if attack is None:
        attack = "switch" if attacker.categories else "apgd-ce"
    made = make(
        attack,
        model,
        perturbations=attacker,
        batch_size=batch_size,
        seed=seed,
    )
    x = made.inputs.array(x).astype("float32")
    if x.ndim != 2:
        raise ValueError(
            f"`x` must be rows of a table [n, M]. Received: shape {x.shape}"
        )
    predicted = made.predict(x)
    made.check_samples(x, predicted)
    certified = certified_radius(
        model,
        x,
        predicted,
        perturbations=attacker,
        method=method,
        tolerance=tolerance,
        max_radius=max_price,
        verbose=0,
    )
    columns = _columns(data, x.shape[1])
    search = _Search(made, x, predicted, certified, max_price)
    if method == "exact":
        search.offer_nearest(model, tolerance)
    search.run([column.inputs for column in columns])
    return _told(search, certified, data, columns)


def _told(search: _Search, certified, data, columns) -> Flips:
    """What was found, in the words of the data set."""
    attacker = search.attack.perturbations
    names = _names_of(data)
    won = np.isfinite(search.price)
    after = search.attack.predict(search.points)
    return Flips(
        predicted=names(search.labels),
        becomes=np.where(won, names(after), ""),
        certified=certified,
        # A proof holds; what an attack seems to win below it is rounding.
        price=np.maximum(search.price, certified),
        changes=tuple(
            tuple(_changes(columns, data, attacker, old, new)) if flag else ()
            for old, new, flag in zip(search.x, search.points, won, strict=True)
        ),
        columns=tuple(column.name for column in columns),
        units="the model's input" if data is None else data.units,
        attacker=str(attacker),
    )


class _Search:
    """The cheapest points found so far, and their prices."""

    def __init__(self, attack: Attack, x, labels, certified, limit: float):
        self.attack, self.x, self.labels = attack, x, labels
        self.limit = limit
        self.failed = np.maximum(certified, _LEAST)
        # What is proved up to the limit needs no search.
        self.hopeless = certified >= limit
        self.points = x.copy()
        self.price = np.full(len(x), np.inf)

    def run(self, columns: list[slice]) -> None:
        """Finds changes, and makes them as cheap as it can.

        Args:
            columns: the inputs of each column of the table.
        """
        self.widen()
        self.tighten()
        self.take_back(columns)
        self.shorten()
        self.try_single_moves()
        self.shorten()

    def offer(self, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Takes the points that flip their rows and are cheaper: [rows]."""
        if not len(rows):
            return np.zeros(0, bool)
        limits = self.attack.perturbations
        price = limits.price(self.x[rows], points)
        better = price < self.price[rows]
        better &= self.attack.predict(points) != self.labels[rows]
        better &= limits.contains(self.x[rows], points, price)
        self.points[rows[better]] = points[better]
        self.price[rows[better]] = price[better]
        return better

    def offer_nearest(self, model: keras.Model, tolerance: float) -> None:
        """Takes what the exact method finds just beyond what it proves."""
        rows = np.flatnonzero(~self.hopeless)
        if not len(rows):
            return
        found = certify(
            model,
            self.x[rows],
            self.labels[rows],
            rho=self.failed[rows] * (1.0 + 2.0 * tolerance),
            perturbations=self.attack.perturbations,
            method="exact",
            decide_only=True,
            verbose=0,
        )
        assert found.counterexamples is not None
        self.offer(rows[found.broken], found.counterexamples[found.broken])

    def widen(self) -> None:
        """Attacks with a growing radius, until the decision flips."""
        rho = self.failed * 1.01
        while True:
            left = np.isinf(self.price) & (rho <= self.limit) & ~self.hopeless
            rows = np.flatnonzero(left)
            if not len(rows):
                return
            won = self._try(rows, rho[rows])
            self.failed[rows[~won]] = rho[rows[~won]]
            rho[rows] *= _GROWTH

    def tighten(self) -> None:
        """Attacks between the radius that failed and the price found."""
        for _ in range(_ROUNDS):
            rows = np.flatnonzero(
                np.isfinite(self.price) & (self.price > 1.02 * self.failed)
            )
            if not len(rows):
                return
            middle = np.sqrt(self.failed[rows] * self.price[rows])
            won = self._try(rows, middle)
            self.failed[rows[~won]] = middle[~won]

    def take_back(self, groups: list[slice]) -> None:
        """Takes back what is not needed, column by column."""
        rows = np.flatnonzero(np.isfinite(self.price))
        for group in groups:
            points = self.points[rows].copy()
            points[:, group] = self.x[rows][:, group]
            some = np.any(points != self.points[rows], axis=1)
            self.offer(rows[some], points[some])

    def shorten(self) -> None:
        """Halves the way back of all that can move a little."""
        free = self.attack.perturbations.reach(self.x.shape[1:]) > 0
        rows = np.flatnonzero(np.isfinite(self.price))
        moves = (self.points - self.x)[rows] * free
        still = self.points[rows] - moves
        low, high = np.zeros(len(rows)), np.ones(len(rows))
        for _ in range(_HALVINGS):
            share = (low + high) / 2
            points = (still + share[:, None] * moves).astype("float32")
            won = self.offer(rows, points)
            high, low = np.where(won, share, high), np.where(won, low, share)

    def try_single_moves(self) -> None:
        """Tries one move for all moves of a row, with its switches or none.

        The corners of the L1 ball are such moves, and easier to read.
        """
        limits = self.attack.perturbations
        reach = limits.reach(self.x.shape[1:])
        rows = np.flatnonzero(np.isfinite(self.price))
        free = reach > 0
        for with_switches in (True, False):
            start = self.x[rows].copy()
            if with_switches:
                start[:, ~free] = self.points[rows][:, ~free]
            spent = limits.price(self.x[rows], start)
            for feature in np.flatnonzero(free):
                for sign in (1.0, -1.0):
                    # A little less than now, or nothing is won.
                    budget = 0.999 * np.maximum(self.price[rows] - spent, 0.0)
                    points = start.copy()
                    points[:, feature] += sign * budget * reach[feature]
                    self.offer(rows, _inside(points, limits))

    def _try(self, rows, rho) -> np.ndarray:
        points = self.attack(self.x[rows], self.labels[rows], rho)
        return self.offer(rows, points)


def _inside(points, limits: PerturbationSet) -> np.ndarray:
    """The points, each feature within its valid range."""
    if limits.input_range is None:
        return points
    return np.clip(points, *limits.input_range).astype("float32")


def _columns(data, size) -> tuple[Column, ...]:
    if data is not None and data.schema is not None:
        return data.schema.columns
    names = None if data is None else data.feature_names
    return tuple(
        Column(str(i) if names is None else names[i], "number", i)
        for i in range(size)
    )


def _names_of(data):
    if data is None:
        return lambda numbers: np.array([str(number) for number in numbers])
    return data.name_classes


def _changes(columns, data, attacker, old, new):
    """What happens to the columns of one row, the dearest first."""
    if data is None or data.raw_scale is None:
        raw_old, raw_new = old, new
    else:
        raw_old, raw_new = data.raw(old), data.raw(new)
    found = []
    for column in columns:
        where = column.inputs
        if np.array_equal(old[where], new[where]):
            continue
        only = old.copy()
        only[where] = new[where]
        found.append(
            Change(
                column.name,
                column.read(raw_old[where]),
                column.read(raw_new[where]),
                float(attacker.price(old[None], only[None])[0]),
            )
        )
    return sorted(found, key=lambda change: -change.price)


def _finite(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _word(value) -> str:
    if value is None:
        return "(missing)"
    return value if isinstance(value, str) else f"{value:.6g}"


def _cell(value) -> str:
    if value is None:
        return "none found"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
