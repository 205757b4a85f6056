"""Columns that can't move a little: categories and whole steps.

What an attacker does to such a column is a *switch*: one category for
another, or one step up or down. A switch is done or not done, and has a price.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# A radius that falls short of a price by this part of it still buys it, so
# that rounding never hides a switch.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Category:
    """A group of one-hot columns, of which an attacker may choose another.

    Args:
        columns: list of two or more column numbers, in the order of the
            categories. In each row one of them is 1 and the others are 0.
        price: what a switch takes of the radius: a number above 0, or a
            table [n, n] from the category of the row to the new one. Where
            the table holds `None` or infinity the switch is impossible; its
            diagonal is not read. Defaults to `1.0`.

    Example:
    ```python
    # Job is in the columns 3 to 5; nobody becomes a pensioner (5) in vain.
    job = keras_rub.Category(
        [3, 4, 5], price=[[0, 1, 9], [1, 0, 9], [None, None, 0]]
    )
    ```
    """

    columns: tuple[int, ...]
    price: Any = 1.0

    def __init__(self, columns: Sequence[int], price: Any = 1.0):
        columns = _columns(columns, "columns")
        if len(columns) < 2 or len(set(columns)) < len(columns):
            raise ValueError(
                "`columns` of a Category must be two or more different "
                f"columns. Received: `columns={list(columns)}`"
            )
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "price", _price(price, len(columns)))

    @property
    def prices(self) -> np.ndarray:
        """Prices [n, n], from the category of a row to another.

        Infinite where a switch is impossible, also to the category itself.
        """
        count = len(self.columns)
        table = np.broadcast_to(np.asarray(self.price, "float64"), [count] * 2)
        return np.where(np.eye(count, dtype=bool), np.inf, table)

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain lists and numbers."""
        price = self.price
        if not isinstance(price, float):
            price = [
                [None if math.isinf(entry) else entry for entry in row]
                for row in price
            ]
        return {"columns": list(self.columns), "price": price}


@dataclasses.dataclass(frozen=True)
class Ordinal:
    """A column that moves in whole steps, such as a count or a grade.

    Args:
        column: int. The number of the column.
        step: float above 0. The length of a step, in the units of the
            column. Defaults to `1.0`.
        price: float above 0. What each step takes of the radius. Defaults to
            `1.0`.
    """

    column: int
    step: float = 1.0
    price: float = 1.0

    def __init__(self, column: int, step: float = 1.0, price: float = 1.0):
        object.__setattr__(self, "column", _columns([column], "column")[0])
        for name, value in (("step", step), ("price", price)):
            if not (_is_number(value) and 0.0 < float(value) < math.inf):
                raise ValueError(
                    f"`{name}` of an Ordinal must be a finite number above "
                    f"0. Received: `{name}={value!r}`"
                )
            object.__setattr__(self, name, float(value))

    @property
    def columns(self) -> tuple[int, ...]:
        """The column, as of a group of one."""
        return (self.column,)

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain numbers."""
        return dataclasses.asdict(self)


def as_groups(categories: Any) -> tuple[Category | Ordinal, ...]:
    """Records of what a user gives as `categories`, or raises.

    Args:
        categories: sequence of `Category`, `Ordinal`, or their configs.
    """
    if isinstance(categories, (Category, Ordinal, dict, str)) or not hasattr(
        categories, "__iter__"
    ):
        categories = [categories]
    groups = []
    for group in categories:
        if isinstance(group, dict):
            group = (Ordinal if "column" in group else Category)(**group)
        if not isinstance(group, (Category, Ordinal)):
            raise TypeError(
                "`categories` must hold keras_rub.Category and "
                f"keras_rub.Ordinal records. Received: {group!r}"
            )
        groups.append(group)
    used: set[int] = set()
    for group in groups:
        twice = used.intersection(group.columns)
        if twice:
            raise ValueError(
                "`categories` must not share columns. "
                f"Received: column {min(twice)} in two of them"
            )
        used.update(group.columns)
    return tuple(groups)


class Switches(NamedTuple):
    """The switches of a batch, and what a radius buys of each.

    Switch s of a sample moves column `columns[s]` by `sizes`, and column
    `origins` by as much the other way; where that is the number of all
    columns there is none. `prices` is infinite where the sample has no such
    switch. `most` is how many of it the radius buys within the valid range:
    0 or 1 of a category, whole steps of an ordinal column.
    """

    table: SwitchTable
    columns: tf.Tensor  # [S]
    origins: tf.Tensor  # [batch, S]
    sizes: tf.Tensor  # [S]
    prices: tf.Tensor  # [batch, S]
    most: tf.Tensor  # [batch, S]

    @property
    def steps(self) -> tf.Tensor:
        """How far a radius of one moves the columns: [batch, S]."""
        return self.sizes / self.prices

    @property
    def cost(self) -> tf.Tensor:
        """What the most of each switch takes of the radius: [batch, S]."""
        finite = tf.where(self.most > 0, self.prices, 0.0)
        return self.most * finite

    def longest(self, room: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """What all switches together can take of any radius: [batch].

        Args:
            room: pair of tensors [batch, M], as in `SwitchTable.of`.
        """
        up, down = (tf.gather(part, self.columns, axis=1) for part in room)
        times = tf.where(self.sizes > 0, up, down) / tf.abs(self.sizes)
        times = tf.where(tf.constant(self.table.is_ordinal), times, 1.0)
        possible = tf.math.is_finite(self.prices)
        cost = tf.where(possible, self.prices * times, 0.0)
        best = tf.reduce_max(self.table.by_group(cost, 0.0), axis=-1)
        return tf.reduce_sum(best, axis=-1)

    def caps(self, rho: tf.Tensor) -> tf.Tensor:
        """The largest share [batch, S] of radii [batch] that each takes."""
        return tf.math.divide_no_nan(self.cost, rho[:, None])

    def differences(self, rows: tf.Tensor) -> tf.Tensor:
        """What a radius of one in each switch adds to linear functions.

        Args:
            rows: tensor [batch or 1, R, M].

        Returns:
            Tensor [batch, R, S].
        """
        batch = tf.shape(self.origins)[0]
        shape = tf.concat([[batch], tf.shape(rows)[1:]], axis=0)
        padded = tf.pad(tf.broadcast_to(rows, shape), [[0, 0], [0, 0], [0, 1]])
        gone = tf.gather(padded, self.origins, axis=2, batch_dims=1)
        come = tf.gather(rows, self.columns, axis=2)
        return (come - gone) * self.steps[:, None]


class SwitchTable:
    """All switches of some groups, as arrays.

    Args:
        groups: `Category` and `Ordinal` records.
        size: int. The number of columns of a row.
    """

    def __init__(self, groups: Sequence[Category | Ordinal], size: int):
        self.groups, self.size = tuple(groups), size
        columns: list[int] = []
        sizes: list[float] = []
        group_of: list[int] = []
        tables: list[np.ndarray] = []
        for number, group in enumerate(self.groups):
            if isinstance(group, Category):
                columns += group.columns
                sizes += [1.0] * len(group.columns)
                tables.append(group.prices.T)
            else:
                columns += [group.column] * 2
                sizes += [group.step, -group.step]
                tables.append(np.full([2, 1], group.price))
            group_of += [number] * (len(columns) - len(group_of))
        self.columns = np.array(columns, "int32")
        self.sizes = np.array(sizes, "float64")
        self.group_of = np.array(group_of, "int32")
        self.is_ordinal = np.array(
            [isinstance(self.groups[g], Ordinal) for g in group_of], bool
        )
        # By switch, and by the category that the sample has.
        widest = max((table.shape[1] for table in tables), default=1)
        self.prices = np.concatenate(
            [
                np.pad(
                    table,
                    [(0, 0), (0, widest - table.shape[1])],
                    constant_values=np.inf,
                )
                for table in tables
            ]
        )
        # The switches of each group, filled up with one that does not exist.
        counts = np.bincount(self.group_of, minlength=len(self.groups))
        self.members = np.full(
            [len(self.groups), counts.max()], len(columns), "int32"
        )
        # The columns among which a sample's category is found.
        self.places = np.full([len(self.groups), widest], size, "int32")
        for number, group in enumerate(self.groups):
            found = np.flatnonzero(self.group_of == number)
            self.members[number, : len(found)] = found
            if isinstance(group, Category):
                self.places[number, : len(group.columns)] = group.columns

    def __len__(self) -> int:
        return len(self.columns)

    def present(self, flat: tf.Tensor) -> tf.Tensor:
        """Which category of each group a row [batch, M] has: [batch, G].

        Always 0 for an ordinal column.
        """
        padded = tf.pad(flat, [[0, 0], [0, 1]], constant_values=-1.0)
        found = tf.gather(padded, tf.constant(self.places), axis=1)
        return tf.argmax(found, axis=-1, output_type=tf.int32)

    def of(
        self,
        flat: tf.Tensor,
        rho: tf.Tensor,
        room: tuple[tf.Tensor, tf.Tensor],
    ) -> Switches:
        """The switches of a batch.

        Args:
            flat: tensor [batch, M].
            rho: tensor [batch]. The radii.
            room: pair of tensors [batch, M]. How far each column can move up,
                and down.
        """
        dtype = flat.dtype
        present = self.present(flat)
        group_of = tf.constant(self.group_of)
        own = tf.gather(present, group_of, axis=1)  # [batch, S]

        def at_own(table, rows):
            rows = tf.broadcast_to(rows, tf.shape(own))
            return tf.gather_nd(table, tf.stack([rows, own], axis=-1))

        prices = at_own(tf.constant(self.prices, dtype), tf.range(len(self)))
        origins = at_own(tf.constant(self.places), group_of)
        bought = tf.floor(rho[:, None] / prices * (1.0 + _ROUNDING))
        sizes = tf.constant(self.sizes, dtype)
        columns = tf.constant(self.columns)
        up, down = (tf.gather(part, columns, axis=1) for part in room)
        length = tf.where(sizes > 0, up, down) / tf.abs(sizes)
        steps = tf.minimum(bought, tf.floor(length * (1.0 + _ROUNDING)))
        most = tf.where(
            tf.constant(self.is_ordinal), steps, tf.minimum(bought, 1.0)
        )
        return Switches(self, columns, origins, sizes, prices, most)

    def by_group(self, values: tf.Tensor, fill: float) -> tf.Tensor:
        """Values [..., S] of the switches as [..., G, n], filled up."""
        padding = [[0, 0]] * (len(values.shape) - 1) + [[0, 1]]
        padded = tf.pad(values, padding, constant_values=fill)
        return tf.gather(padded, tf.constant(self.members), axis=-1)


@functools.lru_cache(maxsize=64)
def switch_table(
    groups: tuple[Category | Ordinal, ...], size: int
) -> SwitchTable:
    """The table of these groups, made once."""
    return SwitchTable(groups, size)


def is_affordable(price: Any, rho: Any) -> Any:
    """Whether a radius buys what has this price, in spite of rounding."""
    return price <= np.asarray(rho) * (1.0 + _ROUNDING)


def _is_number(value: Any) -> bool:
    return isinstance(
        value, (int, float, np.integer, np.floating)
    ) and not isinstance(value, (bool, np.bool_))


def _columns(columns: Any, name: str) -> tuple[int, ...]:
    given = columns if hasattr(columns, "__iter__") else [columns]
    found = []
    for column in given:
        if (
            not isinstance(column, (int, np.integer))
            or isinstance(column, bool)
            or column < 0
        ):
            raise ValueError(
                f"`{name}` must be whole numbers of at least 0, counted from "
                "the first column; names are known to a data set only. "
                f"Received: `{name}={columns!r}`"
            )
        found.append(int(column))
    return tuple(found)


def _price(price: Any, count: int) -> Any:
    """A float, or a table of tuples that holds infinity for impossible."""
    if _is_number(price):
        if not 0.0 < price < math.inf:
            raise ValueError(
                "`price` must be finite and above 0; leave a group out that "
                f"can't switch. Received: `price={price!r}`"
            )
        return float(price)
    try:
        rows = [
            [math.inf if entry is None else float(entry) for entry in row]
            for row in price
        ]
        table = np.array(rows, "float64")
    except (TypeError, ValueError):
        table = np.zeros(0)
    if table.shape != (count, count):
        raise ValueError(
            f"`price` must be a number or a table of {count} rows and "
            f"{count} columns, one for each category. "
            f"Received: `price={price!r}`"
        )
    np.fill_diagonal(table, 0.0)
    others = table[~np.eye(count, dtype=bool)]
    if not np.all(others > 0.0):
        raise ValueError(
            "`price` must be above 0 between different categories. "
            f"Received: `price={price!r}`"
        )
    if not np.isfinite(others).any():
        raise ValueError(
            "`price` must allow one switch at least; leave a group out that "
            f"can't switch. Received: `price={price!r}`"
        )
    return tuple(tuple(row) for row in table.tolist())


def switched_rows(
    groups: Sequence[Category | Ordinal],
    row: np.ndarray,
    rho: float,
    room: tuple[np.ndarray, np.ndarray],
    most: int,
) -> tuple[np.ndarray, np.ndarray] | None:
    """All rows that switches alone reach, the row itself first.

    Args:
        groups: `Category` and `Ordinal` records.
        row: float array [M].
        rho: float. What the switches may cost together.
        room: pair of arrays [M]. How far each column can move up, and down.
        most: int. The largest number of rows that is wanted.

    Returns:
        Rows [n, M] and what each costs [n]; `None` if they are more.
    """
    found: list[tuple[dict[int, float], float]] = [({}, 0.0)]
    for group in groups:
        more = [
            ({**values, **change}, spent + price)
            for values, spent in found
            for change, price in _changes(group, row, rho - spent, room)
            if is_affordable(spent + price, rho)
        ]
        found += more
        if len(found) > most:
            return None
    rows = np.repeat(row[None], len(found), axis=0)
    for number, (values, _) in enumerate(found):
        rows[number, list(values)] = list(values.values())
    return rows, np.array([spent for _, spent in found])


def _changes(group, row, rho, room):
    """What can be done to a group, as values by column, and its price."""
    rho *= 1.0 + _ROUNDING
    if isinstance(group, Category):
        start = int(row[list(group.columns)].argmax())
        for end, price in enumerate(group.prices[start]):
            if price <= rho:
                yield (
                    {
                        group.columns[start]: 0.0,
                        group.columns[end]: 1.0,
                    },
                    float(price),
                )
        return
    column = group.column
    for sign, limit in ((1.0, room[0][column]), (-1.0, room[1][column])):
        steps = min(rho / group.price, limit / group.step * (1.0 + _ROUNDING))
        for count in range(1, int(steps) + 1):
            moved = float(row[column]) + sign * count * group.step
            yield {column: moved}, count * group.price


def single_switches(
    groups: Sequence[Category | Ordinal],
    row: np.ndarray,
    rho: float,
    room: tuple[np.ndarray, np.ndarray],
    origin: np.ndarray | None = None,
) -> list[tuple[np.ndarray, float, Category | Ordinal]]:
    """Rows in which one group is switched, what it costs, and the group.

    Args:
        groups: `Category` and `Ordinal` records.
        row: float array [M].
        rho: float. What the switch may cost.
        room: pair of arrays [M]. How far each column can move up, and down.
        origin: float array [M], or `None`. The row whose categories count for
            the prices. Defaults to `None`, `row`.
    """
    found = []
    for group in groups:
        start = row if origin is None else origin
        for values, price in _changes(group, start, rho, room):
            other = row.copy()
            other[list(values)] = list(values.values())
            found.append((other, price, group))
    return found


def random_switches(
    groups: Sequence[Category | Ordinal],
    row: np.ndarray,
    rho: float,
    room: tuple[np.ndarray, np.ndarray],
    rng: np.random.Generator,
) -> tuple[np.ndarray, float]:
    """A row that random switches reach, and what they cost.

    Args:
        groups: `Category` and `Ordinal` records.
        row: float array [M].
        rho: float. What the switches may cost together.
        room: pair of arrays [M]. How far each column can move up, and down.
        rng: of the draws.
    """
    found, spent = row.copy(), 0.0
    for number in rng.permutation(len(groups)):
        options = single_switches(
            [groups[number]], found, rho - spent, room, row
        )
        if options and rng.random() < 0.5:
            found, price, _ = options[rng.integers(len(options))]
            spent += price
    return found, spent
