"""Perturbation sets: what an attacker may do to one input."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_rub.categories import (
    Category,
    Ordinal,
    Switches,
    SwitchTable,
    as_groups,
    is_affordable,
    switch_table,
)

NORMS = (1, 2, "inf")


def canonical_norm(norm: Any) -> int | str:
    """Returns `norm` as one of `1`, `2` or `"inf"`, or raises."""
    names: dict[str, int | str] = {
        "1": 1,
        "l1": 1,
        "2": 2,
        "l2": 2,
        "inf": "inf",
        "linf": "inf",
    }
    if isinstance(norm, str) and norm.lower() in names:
        return names[norm.lower()]
    if isinstance(norm, (int, float, np.integer, np.floating)):
        if norm == math.inf:
            return "inf"
        if norm in (1, 2) and not isinstance(norm, bool):
            return int(norm)
    raise ValueError(
        f'`norm` must be 1, 2 or "inf" (np.inf is accepted). '
        f"Received: `norm={norm!r}`"
    )


def check_rho(rho: Any, name: str = "rho") -> float:
    """Returns `rho` as a float, or raises if it is no radius."""
    try:
        value = float(rho)
    except (TypeError, ValueError):
        raise TypeError(
            f"`{name}` must be a number. "
            f"Received: `{name}={rho!r}` of type {type(rho).__name__}"
        ) from None
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(
            f"`{name}` must be finite and at least 0. "
            f"Received: `{name}={rho!r}`"
        )
    return value


class PerturbationSet:
    """What an attacker may do: all `d` with `||weights * d||_norm <= rho`.

    Only features whose `mask` is true move, and `x + d` stays within
    `input_range` where one is given. The radius is not a part of the set: it
    may change at every training step and differ between samples, so the
    methods take it as an argument.

    With `categories` a row of a table is meant, and the radius is a price:
    the attacker buys switches of categories, whole steps of ordinal columns
    and moves of all other features, at most `rho` in sum:
    `||weights * d||_1 + prices of the switches <= rho`. Half a category is no
    category: a group whose price exceeds `rho` can't move at all.

    Args:
        norm: 1, 2 or `"inf"`. The norm that measures a perturbation. Defaults
            to `1`.
        mask: boolean array that broadcasts to the shape of one input, or
            `None`. Features where it is false never change. Defaults to
            `None`, every feature may change.
        weights: array of positive numbers that broadcasts to the shape of one
            input, or `None`. The cost of moving each feature by one unit.
            Defaults to `None`, all ones.
        input_range: pair `(low, high)`, or `None`. The valid inputs; each end
            is a number or an array that broadcasts to the shape of one input,
            and may be infinite or `None` where nothing limits a feature.
            Defaults to `None`, no limit.
        perturb: string, or `None`. Where a model takes several inputs, the
            name of the one that the attacker moves; the others are fixed, and
            the arguments above are about this one. Defaults to `None`, the
            only input of floating point.
        categories: list of `keras_rub.Category` (a group of one-hot columns,
            by number, and the price of a switch) and `keras_rub.Ordinal` (a
            column that moves in whole steps), or `None`. Needs norm 1.
            `mask` and `weights` are about the other features; a group that
            can't change is masked and left out here. Defaults to `None`.

    Example:
    ```python
    # Feature 0 is the age: it can't change. Feature 2 is twice as hard to move.
    attacker = keras_rub.PerturbationSet(
        norm=1, mask=[False, True, True], weights=[1.0, 1.0, 2.0]
    )
    keras_rub.certify(model, x, y, rho=0.5, perturbations=attacker)

    # Columns 1 to 3 are one category: to switch it costs 0.4.
    attacker = keras_rub.PerturbationSet(
        norm=1, categories=[keras_rub.Category([1, 2, 3], price=0.4)]
    )
    ```
    """

    def __init__(
        self,
        norm: int | str = 1,
        *,
        mask: Any = None,
        weights: Any = None,
        input_range: tuple[Any, Any] | None = None,
        perturb: str | None = None,
        categories: Any = None,
    ):
        self.norm = canonical_norm(norm)
        self.mask = None if mask is None else _boolean_array(mask)
        self.weights = None if weights is None else _positive_array(weights)
        self.input_range = (
            None if input_range is None else _ordered_pair(input_range)
        )
        if not isinstance(perturb, str | None):
            raise TypeError(
                "`perturb` must be the name of an input. "
                f"Received: `perturb={perturb!r}`"
            )
        self.perturb = perturb
        self.categories = () if categories is None else as_groups(categories)
        if self.categories and self.norm != 1:
            raise ValueError(
                "`categories` need norm 1, which adds prices and moves up. "
                f"Received: `norm={self.norm!r}`"
            )

    def with_norm(self, norm: int | str) -> PerturbationSet:
        """The same set measured by another norm."""
        return self.replace(norm=norm)

    def replace(self, **parts: Any) -> PerturbationSet:
        """A copy in which the arguments named have other values."""
        kept = {
            "norm": self.norm,
            "mask": self.mask,
            "weights": self.weights,
            "input_range": self.input_range,
            "perturb": self.perturb,
            "categories": self.categories,
        }
        return PerturbationSet(**{**kept, **parts})

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises unless every array of the set broadcasts to `shape`."""
        parts = {"mask": self.mask, "weights": self.weights}
        if self.input_range is not None:
            parts["input_range low"], parts["input_range high"] = (
                self.input_range
            )
        for name, array in parts.items():
            if array is None:
                continue
            try:
                fits = np.broadcast_shapes(array.shape, shape) == tuple(shape)
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"`{name}` must broadcast to the shape of one input, "
                    f"{tuple(shape)}. Received: shape {array.shape}"
                )
        self._check_categories(tuple(shape))

    def _check_categories(self, shape: tuple[int, ...]) -> None:
        """Raises unless the other parts leave the categories alone."""
        if not self.categories:
            return
        size = flat_size(shape)
        columns = np.array([c for g in self.categories for c in g.columns])
        if columns.max() >= size:
            raise ValueError(
                f"`categories` must name columns below {size}, the number of "
                f"columns of an input. Received: column {columns.max()}"
            )

        def at(array, columns=columns):
            return np.broadcast_to(array, shape).reshape(-1)[columns]

        if self.mask is not None and not at(self.mask).all():
            raise ValueError(
                "`mask` must be true for the columns of `categories`; leave "
                "a group out that can't change. Received: a mask that holds "
                f"column {columns[~at(self.mask)][0]} fixed"
            )
        if self.weights is not None and not (at(self.weights) == 1.0).all():
            raise ValueError(
                "`weights` must be 1 for the columns of `categories`, whose "
                "cost is their price. Received: another weight of column "
                f"{columns[at(self.weights) != 1.0][0]}"
            )
        one_hot = np.array(
            [
                column
                for group in self.categories
                if isinstance(group, Category)
                for column in group.columns
            ],
            int,
        )
        if self.input_range is not None:
            low, high = (at(end, one_hot) for end in self.input_range)
            narrow = (low > 0.0) | (high < 1.0)
            if narrow.any():
                raise ValueError(
                    "`input_range` must hold 0 and 1 for the one-hot columns "
                    "of `categories`. Received: a narrower one for column "
                    f"{one_hot[narrow][0]}"
                )

    def numeric(self, shape: tuple[int, ...]) -> PerturbationSet:
        """The same set without its switches.

        The columns of categories stay as they are, and every other feature
        moves as before.

        Args:
            shape: the shape of one input.
        """
        if not self.categories:
            return self
        free = self.reach(shape).reshape(shape) > 0
        return self.replace(categories=None, mask=free)

    def switch_table(self, shape: tuple[int, ...]) -> SwitchTable | None:
        """The switches as arrays, or `None` where there are none."""
        if not self.categories:
            return None
        self.check_shape(shape)
        return switch_table(self.categories, flat_size(shape))

    def switches(self, x: tf.Tensor, rho: tf.Tensor) -> Switches | None:
        """The switches of a batch, or `None` where there are none.

        Args:
            x: tensor [batch, *features] whose groups are one-hot.
            rho: tensor [] or [batch].
        """
        table = self.switch_table(tuple(x.shape[1:]))
        if table is None:
            return None
        rooms = self.room(x)
        assert rooms is not None  # there are categories
        up, down = (tf.reshape(part, [-1, table.size]) for part in rooms)
        rho = tf.broadcast_to(tf.cast(rho, x.dtype), tf.shape(x)[:1])
        return table.of(tf.reshape(x, [-1, table.size]), rho, (up, down))

    def reach(self, shape: tuple[int, ...]) -> np.ndarray:
        """How far a radius of one moves each feature, alone: [M].

        `1 / weight`, and 0 where the mask holds the feature fixed. Columns of
        categories do not move by themselves: 0.

        Args:
            shape: the shape of one input, with M features in all.
        """
        self.check_shape(shape)
        steps = 1.0 if self.weights is None else 1.0 / self.weights
        free = True if self.mask is None else self.mask
        found = (
            np.broadcast_to(steps, shape) * np.broadcast_to(free, shape)
        ).reshape(-1)
        for group in self.categories:
            found[list(group.columns)] = 0.0
        return found

    def magnitudes(self, shape: tuple[int, ...]) -> np.ndarray:
        """The same with the largest moves of switches, for any row: [M]."""
        found = self.reach(shape)
        for group in self.categories:
            if isinstance(group, Ordinal):
                found[group.column] = group.step / group.price
            else:
                found[list(group.columns)] = 1.0 / group.prices.min()
        return found

    def vertices(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Lists the corners of the unit L1 ball as single-feature moves.

        Args:
            shape: the shape of one input, with M features in all.

        Returns:
            A pair of arrays [V]: the flat index of the feature that vertex v
            moves, and how far for a radius of one (`+-1 / weight`). A masked
            feature has no vertex, every other one has two.
        """
        if self.norm != 1:
            raise ValueError(
                "Only the L1 ball has few enough vertices to list. "
                f"Received: `norm={self.norm!r}`"
            )
        reach = self.reach(shape)
        features = np.flatnonzero(reach)
        steps = reach[features]
        return (
            np.concatenate([features, features]).astype("int32"),
            np.concatenate([steps, -steps]).astype("float32"),
        )

    def support(
        self, gradient: tf.Tensor, shape: tuple[int, ...] | None = None
    ) -> tf.Tensor:
        """Largest `<gradient, d>` over the perturbations of radius one.

        Norm, mask and weights count; the valid range does not, which makes it
        an upper bound where there is one. Of categories the cheapest switch
        between the two columns that differ most counts, for any row: an upper
        bound too.

        Args:
            gradient: tensor [..., M], derivatives by the flat features.
            shape: the shape of one input, with M features in all. Defaults to
                `None`, a vector of M features.

        Returns:
            Tensor [...]. Its derivative is finite everywhere, also at a zero
            gradient.
        """
        given = gradient
        if self.mask is not None or self.weights is not None or self.categories:
            shape = (gradient.shape[-1],) if shape is None else shape
            gradient *= tf.constant(self.reach(shape), gradient.dtype)
        magnitude = tf.abs(gradient)
        if self.norm == 1:
            largest = tf.reduce_max(magnitude, axis=-1)
            for group in self.categories:
                largest = tf.maximum(largest, _steepest_switch(given, group))
            return largest
        if self.norm == "inf":
            # A product with ones is faster than a sum on CPU.
            ones = tf.ones([magnitude.shape[-1]], magnitude.dtype)
            return tf.tensordot(magnitude, ones, 1)
        square = tf.reduce_sum(tf.square(gradient), axis=-1)
        positive = square > 0
        # The derivative of sqrt is infinite at 0, so 0 never reaches it.
        return tf.where(
            positive,
            tf.sqrt(tf.where(positive, square, tf.ones_like(square))),
            tf.zeros_like(square),
        )

    def room(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
        """How far each feature of `x` can move up, and down.

        Args:
            x: tensor [batch, *features] inside the valid range.

        Returns:
            A pair of non-negative tensors like `x`, or `None` where there is
            no valid range. With categories there always is one, which is
            infinite where nothing limits a feature.
        """
        limits = self.input_range
        if limits is None and self.categories:
            limits = (np.array(-np.inf), np.array(np.inf))
        if limits is None:
            return None
        low, high = (tf.constant(end, x.dtype) for end in limits)
        return tf.nn.relu(high - x), tf.nn.relu(x - low)

    def contains(
        self, x: Any, points: Any, rho: Any, *, slack: float = 1e-4
    ) -> np.ndarray:
        """Which points an attacker on `x` can reach.

        Args:
            x: array [n, *features]. The clean inputs.
            points: array [n, *features].
            rho: float, or one radius a sample [n].
            slack: float. How far a point may leave the set, as a part of the
                radius and of the range, or of the input where a feature is
                fixed: float32 rounding. Defaults to `1e-4`.

        Returns:
            Boolean array [n].
        """
        x, points = np.asarray(x, "float64"), np.asarray(points, "float64")
        if x.shape != points.shape:
            raise ValueError(
                "`points` must have the shape of `x`. "
                f"Received: shapes {points.shape} and {x.shape}"
            )
        shape = x.shape[1:]
        self.check_shape(shape)
        d = points - x
        fits = np.isfinite(points)
        spent = np.zeros(len(x))
        if self.categories:
            spent, whole = self._spent(x, points, slack)
            fits &= whole.reshape(len(x), *[1] * len(shape))
        if self.mask is not None:
            still = np.abs(d) <= slack * 1e-2 * np.maximum(np.abs(x), 1.0)
            fits &= still | self.mask
            d = d * self.mask
        if self.categories:
            d = d * (self.reach(shape).reshape(shape) > 0)
        if self.weights is not None:
            d = d * self.weights
        if self.input_range is not None:
            low, high = self.input_range
            fits &= points >= low - slack * (high - low)
            fits &= points <= high + slack * (high - low)
        order = {1: 1, 2: 2, "inf": np.inf}[self.norm]
        flat = [len(x), flat_size(shape)]
        size = np.linalg.norm(d.reshape(flat), order, axis=1)
        # No slack for switches, which are bought or not.
        left = np.where(is_affordable(spent, rho), rho - spent, -np.inf)
        near = size <= left + np.asarray(rho) * slack + 1e-9
        return near & fits.reshape(flat).all(axis=1)

    def _spent(self, x, points, slack):
        """What the switches from x to points cost, and which are whole."""
        count = len(x)
        flat = [count, flat_size(x.shape[1:])]
        x, points = x.reshape(flat), points.reshape(flat)
        spent, whole = np.zeros(count), np.ones(count, bool)
        for group in self.categories:
            columns = list(group.columns)
            old, new = x[:, columns], points[:, columns]
            if isinstance(group, Ordinal):
                steps = (new - old)[:, 0] / group.step
                times = np.round(steps)
                spent += group.price * np.abs(times)
                size = np.maximum(1.0, np.abs(old[:, 0]) / group.step)
                whole &= np.abs(steps - times) <= slack * size
                continue
            start, end = old.argmax(axis=1), new.argmax(axis=1)
            category = np.eye(len(columns))[end]
            whole &= (np.abs(new - category) <= slack).all(axis=1)
            spent += np.where(start == end, 0.0, group.prices[start, end])
        return spent, whole

    def price(self, x: Any, points: Any) -> np.ndarray:
        """What moving `x` to `points` takes of the radius.

        The norm of the weighted moves, and the prices of the switches. Whether
        an attacker may go there is not looked at: see `contains`.

        Args:
            x: array [n, *features]. The clean inputs.
            points: array [n, *features].

        Returns:
            Float64 array [n].
        """
        x, points = np.asarray(x, "float64"), np.asarray(points, "float64")
        shape = x.shape[1:]
        spent = np.zeros(len(x))
        if self.categories:
            spent, _ = self._spent(x, points, 0.0)
        moved = np.ones(shape, bool).reshape(-1)
        for group in self.categories:
            moved[list(group.columns)] = False
        d = (points - x) * moved.reshape(shape)
        if self.weights is not None:
            d = d * self.weights
        order = {1: 1, 2: 2, "inf": np.inf}[self.norm]
        flat = d.reshape(len(x), flat_size(shape))
        return spent + np.linalg.norm(flat, order, axis=1)

    def paper_radius(self, number: float, shape: tuple[int, ...]) -> float:
        """The radius that a number of the paper's hyper-parameters means.

        Its code scales the number by the square root of the number of
        features for L1, so that 0.01 on MNIST is a radius of 0.28, and takes
        it as it is for the other norms.

        Args:
            number: float. As given to the paper's code.
            shape: the shape of one input.
        """
        if self.norm == 1:
            return number * math.sqrt(flat_size(tuple(shape)))
        return number

    @property
    def key(self) -> str:
        """The same string for equal sets, in every process: for caches."""
        text = json.dumps(self.get_config(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain lists and numbers."""

        def plain(array):
            return None if array is None else np.asarray(array).tolist()

        return {
            "norm": self.norm,
            "mask": plain(self.mask),
            "weights": plain(self.weights),
            "input_range": None
            if self.input_range is None
            else [_open_ends(plain(end)) for end in self.input_range],
            # Only where there is a choice of inputs.
            **({} if self.perturb is None else {"perturb": self.perturb}),
            **(
                {"categories": [g.get_config() for g in self.categories]}
                if self.categories
                else {}
            ),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PerturbationSet:
        """The set that `get_config` described."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerturbationSet):
            return NotImplemented
        return self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        words = [f"L{self.norm}"]
        if self.mask is not None:
            words.append(f"{int(self.mask.sum())} of {self.mask.size} free")
        if self.weights is not None:
            words.append("weighted")
        if self.input_range is not None:
            low, high = (
                f"{end.min():g}" if end.min() == end.max() else "..."
                for end in self.input_range
            )
            words.append(f"inputs in [{low}, {high}]")
        for kind, name in ((Category, "categories"), (Ordinal, "ordinal")):
            count = sum(isinstance(g, kind) for g in self.categories)
            if count:
                words.append(f"{count} {name}")
        if self.perturb is not None:
            words.append(f"moves {self.perturb!r}")
        return ", ".join(words)

    def __repr__(self) -> str:
        return f"PerturbationSet({self})"


# What a user says about the attacker -----------------------------------------

_DEFAULT_NORM = 1


def attacker_of(
    model: Any,
    perturbations: PerturbationSet | None = None,
    *,
    default_norm: int | str = _DEFAULT_NORM,
    **shorthand: Any,
) -> PerturbationSet:
    """The perturbation set that a call speaks of.

    Args:
        model: a robust model, whose own set is what is meant where nothing
            else is said; or anything else, which has none.
        perturbations: `PerturbationSet`, or `None`. The whole set.
        default_norm: the norm where nobody names one. Defaults to `1`.
        **shorthand: `norm`, `mask`, `weights`, `input_range`, `perturb` and
            `categories`; those that are not `None` take the place of the
            model's own.

    Returns:
        A `PerturbationSet`.
    """
    named = {
        name: value for name, value in shorthand.items() if value is not None
    }
    if perturbations is not None:
        if not isinstance(perturbations, PerturbationSet):
            raise TypeError(
                "`perturbations` must be a keras_rub.PerturbationSet. "
                f"Received: {type(perturbations).__name__}"
            )
        if named:
            raise ValueError(
                f"`perturbations` is the whole attacker: leave out "
                f"{', '.join(f'`{name}`' for name in named)}, or put it into "
                f"the set. Received: `perturbations={perturbations!r}`"
            )
        return perturbations
    own = getattr(model, "perturbations", None)
    if not isinstance(own, PerturbationSet):
        own = PerturbationSet(default_norm)
    return own.replace(**named) if named else own


def _steepest_switch(gradient: tf.Tensor, group: Category | Ordinal):
    """What a radius of one in switches of a group adds at most."""
    columns = tf.gather(gradient, group.columns, axis=-1)
    if isinstance(group, Ordinal):
        return tf.abs(columns[..., 0]) * (group.step / group.price)
    range_ = tf.reduce_max(columns, axis=-1) - tf.reduce_min(columns, axis=-1)
    return range_ / float(group.prices.min())


def _boolean_array(mask: Any) -> np.ndarray:
    array = np.asarray(mask)
    if not np.all((array == 0) | (array == 1)):
        raise ValueError(
            "`mask` must hold only true and false (or 1 and 0). "
            f"Received: an array of dtype {array.dtype}"
        )
    return array.astype(bool)


def _positive_array(weights: Any) -> np.ndarray:
    array = np.asarray(weights, "float64")
    if not np.all(np.isfinite(array) & (array > 0)):
        raise ValueError(
            "`weights` must be finite and above 0; use `mask` for a feature "
            f"that can't change. Received: `weights={weights!r}`"
        )
    return array


def _ordered_pair(input_range: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        low, high = input_range
        low, high = _closed(low, -np.inf), _closed(high, np.inf)
    except (TypeError, ValueError):
        raise ValueError(
            "`input_range` must be a pair (low, high) of numbers or arrays. "
            f"Received: `input_range={input_range!r}`"
        ) from None
    if not np.all(low < high):
        raise ValueError(
            "`input_range` must have low < high everywhere. "
            f"Received: `input_range={input_range!r}`"
        )
    return low, high


def _open_ends(end: Any) -> Any:
    """A limit with `None` where there is none: JSON knows no infinity."""
    if isinstance(end, list):
        return [_open_ends(one) for one in end]
    return end if math.isfinite(end) else None


def _closed(end: Any, infinity: float) -> np.ndarray:
    """A limit as numbers, infinite where it is `None`."""
    given = np.asarray(end, object)
    return np.where(given == None, infinity, given).astype("float64")  # noqa: E711


def flat_size(shape: tuple[int, ...]) -> int:
    """Number of features of one input of the given shape."""
    return int(np.prod(shape, dtype=np.int64))


def paper_radius(
    number: float, norm: int | str, input_shape: tuple[int, ...]
) -> float:
    """As `PerturbationSet(norm).paper_radius(number, input_shape)`."""
    return PerturbationSet(norm).paper_radius(number, tuple(input_shape))
