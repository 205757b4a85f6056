"""Perturbation sets: what an attacker may do to one input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

NORMS = (1, 2, "inf")


def canonical_norm(norm: Any) -> int | str:
    """Returns `norm` as one of `1`, `2` or `"inf"`, or raises."""
    names = {"1": 1, "l1": 1, "2": 2, "l2": 2, "inf": "inf", "linf": "inf"}
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
    """The set of perturbations `d` with `||weights * d||_norm <= rho`.

    Only features whose `mask` is true move, and `x + d` stays within
    `input_range` where one is given. The radius is not a part of the set: it
    may change at every training step and differ between samples, so the
    methods take it as an argument.

    Args:
        norm: 1, 2 or `"inf"`. The norm that measures a perturbation.
        mask: boolean array that broadcasts to the shape of one input, or
            `None`. Features where it is false never change. Defaults to
            `None`, every feature may change.
        weights: array of positive numbers that broadcasts to the shape of one
            input, or `None`. The cost of moving each feature by one unit.
            Defaults to `None`, all ones.
        input_range: pair `(low, high)`, or `None`. The valid inputs; each end
            is a number or an array that broadcasts to the shape of one input.
            Defaults to `None`, no limit.

    Example:
    ```python
    # Feature 0 is the age: it can't change. Feature 2 is twice as hard to move.
    keras_rub.PerturbationSet(
        norm=1, mask=[False, True, True], weights=[1.0, 1.0, 2.0]
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
    ):
        self.norm = canonical_norm(norm)
        self.mask = None if mask is None else _boolean_array(mask)
        self.weights = None if weights is None else _positive_array(weights)
        self.input_range = (
            None if input_range is None else _ordered_pair(input_range)
        )

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
        self.check_shape(shape)
        steps = np.broadcast_to(
            1.0 if self.weights is None else 1.0 / self.weights, shape
        ).reshape(-1)
        free = np.broadcast_to(
            True if self.mask is None else self.mask, shape
        ).reshape(-1)
        features = np.flatnonzero(free)
        steps = steps[features]
        return (
            np.concatenate([features, features]).astype("int32"),
            np.concatenate([steps, -steps]).astype("float32"),
        )

    def dual_norm(self, gradient: tf.Tensor) -> tf.Tensor:
        """Largest `<gradient, d>` over the perturbations `d` of radius one.

        Args:
            gradient: tensor [batch, ..., *features]; all axes after those of
                one input are kept. The features must be flattened to the last
                axis when no mask or weights are given.

        Returns:
            Tensor with the last axis gone. Its derivative is finite
            everywhere, also at a zero gradient.
        """
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

    def scale_gradient(
        self, gradient: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        """Divides by the weights and drops masked features.

        Args:
            gradient: tensor [..., M] of derivatives by the flat features.
            shape: the shape of one input, with M features in all.
        """
        for array in (
            None if self.weights is None else 1.0 / self.weights,
            self.mask,
        ):
            if array is not None:
                flat = np.broadcast_to(array, shape).reshape(-1)
                gradient *= tf.constant(flat, gradient.dtype)
        return gradient

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
        }


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
