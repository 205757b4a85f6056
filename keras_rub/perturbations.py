"""Perturbation sets: what an attacker may do to one input."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import tensorflow as tf

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
            is a number or an array that broadcasts to the shape of one input.
            Defaults to `None`, no limit.
        perturb: string, or `None`. Where a model takes several inputs, the
            name of the one that the attacker moves; the others are fixed, and
            the arguments above are about this one. Defaults to `None`, the
            only input of floating point.

    Example:
    ```python
    # Feature 0 is the age: it can't change. Feature 2 is twice as hard to move.
    attacker = keras_rub.PerturbationSet(
        norm=1, mask=[False, True, True], weights=[1.0, 1.0, 2.0]
    )
    keras_rub.certify(model, x, y, rho=0.5, perturbations=attacker)
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

    def reach(self, shape: tuple[int, ...]) -> np.ndarray:
        """How far a radius of one moves each feature, alone: [M].

        `1 / weight`, and 0 where the mask holds the feature fixed.

        Args:
            shape: the shape of one input, with M features in all.
        """
        self.check_shape(shape)
        steps = 1.0 if self.weights is None else 1.0 / self.weights
        free = True if self.mask is None else self.mask
        return (
            np.broadcast_to(steps, shape) * np.broadcast_to(free, shape)
        ).reshape(-1)

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
        an upper bound where there is one.

        Args:
            gradient: tensor [..., M], derivatives by the flat features.
            shape: the shape of one input, with M features in all. Defaults to
                `None`, a vector of M features.

        Returns:
            Tensor [...]. Its derivative is finite everywhere, also at a zero
            gradient.
        """
        if self.mask is not None or self.weights is not None:
            shape = (gradient.shape[-1],) if shape is None else shape
            gradient *= tf.constant(self.reach(shape), gradient.dtype)
        magnitude = tf.abs(gradient)
        if self.norm == 1:
            return tf.reduce_max(magnitude, axis=-1)
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
            no valid range.
        """
        if self.input_range is None:
            return None
        low, high = (tf.constant(end, x.dtype) for end in self.input_range)
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
        if self.mask is not None:
            still = np.abs(d) <= slack * 1e-2 * np.maximum(np.abs(x), 1.0)
            fits &= still | self.mask
            d = d * self.mask
        if self.weights is not None:
            d = d * self.weights
        if self.input_range is not None:
            low, high = self.input_range
            fits &= points >= low - slack * (high - low)
            fits &= points <= high + slack * (high - low)
        order = {1: 1, 2: 2, "inf": np.inf}[self.norm]
        size = np.linalg.norm(d.reshape(len(x), -1), order, axis=1)
        near = size <= np.asarray(rho) * (1.0 + slack) + 1e-9
        return near & fits.reshape(len(x), -1).all(axis=1)

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
            else [plain(end) for end in self.input_range],
            # Only where there is a choice of inputs.
            **({} if self.perturb is None else {"perturb": self.perturb}),
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
        **shorthand: `norm`, `mask`, `weights`, `input_range` and `perturb`;
            those that are not `None` take the place of the model's own.

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
        low, high = np.asarray(low, "float64"), np.asarray(high, "float64")
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


def flat_size(shape: tuple[int, ...]) -> int:
    """Number of features of one input of the given shape."""
    return int(np.prod(shape, dtype=np.int64))


def paper_radius(
    number: float, norm: int | str, input_shape: tuple[int, ...]
) -> float:
    """As `PerturbationSet(norm).paper_radius(number, input_shape)`."""
    return PerturbationSet(norm).paper_radius(number, tuple(input_shape))
