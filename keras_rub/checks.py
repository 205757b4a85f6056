"""Checks of values that are only known while a graph runs.

A failed check inside a `tf.function` can only surface as TensorFlow's own
`InvalidArgumentError`, deep in a graph. Each check here carries a marked
message, and `clear_errors` turns it into a plain `ValueError` at the call that
the user made.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.categories import Category
from keras_rub.perturbations import PerturbationSet

_MARK = "[keras_rub]"


def require(condition: tf.Tensor, message: str) -> tf.Operation | None:
    """Fails with `message` unless the boolean scalar `condition` holds."""
    return tf.debugging.Assert(condition, [f"{_MARK} {message} {_MARK}"])


def require_finite(x: tf.Tensor, name: str = "x") -> None:
    """Fails if `x` holds NaN or infinity."""
    require(
        tf.reduce_all(tf.math.is_finite(x)),
        f"`{name}` holds NaN or infinite values. Replace or drop them first "
        "(numpy.nan_to_num, for example).",
    )


def require_in_range(x: tf.Tensor, input_range: tuple | None) -> None:
    """Fails if `x` leaves the valid range."""
    if input_range is None:
        return
    low, high = (tf.constant(end, x.dtype) for end in input_range)
    require(
        tf.reduce_all((x >= low) & (x <= high)),
        "`x` leaves `input_range`. Every input must lie inside the range "
        f"that an attacker must respect. Received: `input_range="
        f"{tuple(np.asarray(end).tolist() for end in input_range)}`",
    )


def require_valid(x: tf.Tensor, perturbations: PerturbationSet) -> None:
    """Fails if `x` holds no inputs that this attacker can start from."""
    require_finite(x)
    require_in_range(x, perturbations.input_range)
    for group in perturbations.categories:
        if isinstance(group, Category):
            require(
                tf.reduce_all(is_one_hot(x, group)),
                "`x` must have a single 1, and 0 elsewhere, in the columns of "
                "each category. Received: rows without, in the columns "
                f"{list(group.columns)}",
            )


def is_one_hot(x: tf.Tensor, group: Category) -> tf.Tensor:
    """Which rows [batch] have one category of the group."""
    size = tf.TensorShape(x.shape[1:]).num_elements()
    columns = tf.gather(tf.reshape(x, [-1, size]), group.columns, axis=1)
    whole = tf.reduce_all((columns == 0.0) | (columns == 1.0), axis=1)
    return whole & (tf.reduce_sum(columns, axis=1) == 1.0)


def class_labels(y: Any, num_classes: int) -> tf.Tensor:
    """Class numbers of sparse or one-hot labels, checked.

    Args:
        y: labels, [batch] or [batch, 1] class numbers or [batch, K] one-hot
            rows; a structure that holds just one such tensor is accepted.
        num_classes: int. K.

    Returns:
        Int32 tensor [batch]. Reading it waits for the checks.
    """
    if isinstance(y, (list, tuple)) and y and np.ndim(y[0]) == 0:
        y = np.asarray(y)  # a plain list of class numbers, no structure
    leaves = keras.tree.flatten(y)
    if len(leaves) != 1 or leaves[0] is None:
        raise ValueError(
            "A robust loss needs the labels `y`: class numbers [batch], or "
            f"one-hot rows [batch, {num_classes}]. Received: `y={y!r}`"
        )
    refuse_words(leaves[0])
    y = tf.convert_to_tensor(leaves[0])
    if y.shape.rank == 2 and y.shape[-1] == num_classes:
        y = tf.cast(y, tf.float32)
        check = require(
            tf.reduce_all(tf.reduce_max(y, axis=-1) == 1.0)
            & tf.reduce_all(tf.reduce_sum(tf.abs(y), axis=-1) == 1.0),
            "One-hot `y` must have a single 1 in each row and 0 elsewhere: "
            "a bound needs one true class, so smoothed or mixed labels "
            "can't be used.",
        )
        return _after(check, tf.argmax(y, axis=-1, output_type=tf.int32))
    if y.shape.rank == 2 and y.shape[-1] == 1:
        y = y[:, 0]
    if y.shape.rank != 1:
        raise ValueError(
            f"`y` must hold class numbers [batch] or one-hot rows [batch, "
            f"{num_classes}]. Received: shape {y.shape}"
        )
    labels = tf.cast(y, tf.int32)
    check = require(
        tf.reduce_all((labels >= 0) & (labels < num_classes))
        & tf.reduce_all(tf.cast(labels, y.dtype) == y),
        f"`y` must hold class numbers from 0 to {num_classes - 1}, because "
        f"the model has {num_classes} classes.",
    )
    return _after(check, labels)


def refuse_words(y: Any) -> None:
    """Raises if these labels are words, which no loss can read."""
    dtype = getattr(y, "dtype", None)
    words = dtype == tf.string
    if not words and not isinstance(y, tf.Tensor):
        first = np.asarray(y).ravel()[:1]
        words = first.dtype.kind in "USO" and isinstance(
            first[0] if len(first) else None, (str, bytes)
        )
    if words:
        raise ValueError(
            "`y` must hold class numbers, not words: number the classes "
            "first, as by `names, y = numpy.unique(y, return_inverse=True)`. "
            f"Received: labels of type {getattr(dtype, 'name', 'str')}"
        )


def no_gradient() -> ValueError:
    """The error for a model that gradients can't find a way through."""
    return ValueError(
        "The model has no gradient with respect to its input, so neither "
        "a gradient attack nor a first-order defence can work. Look for a "
        "layer that rounds, takes an argmax, looks up an embedding or "
        "stops the gradient."
    )


def _after(check: tf.Operation | None, tensor: tf.Tensor) -> tf.Tensor:
    # A traced operation does not wait for a check that stands before it.
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(tensor)


@contextlib.contextmanager
def clear_errors():
    """Raises what went wrong in a traced step as if it had been eager."""
    try:
        yield
        return
    except tf.errors.InvalidArgumentError as error:
        found = re.search(
            re.escape(_MARK) + r"(.*?)" + re.escape(_MARK),
            str(error),
            flags=re.DOTALL,
        )
        if found is None:
            raise
        clear: Exception = ValueError(found.group(1).strip())
    except (TypeError, ValueError) as error:
        # AutoGraph wraps an error in a listing of the traced code.
        metadata = getattr(error, "ag_error_metadata", None)
        message = getattr(metadata, "cause_message", None)
        if message is None:
            raise
        clear = type(error)(message)
    raise clear


def with_clear_errors(method: Callable) -> Callable:
    """Decorates a method so that failed checks surface as `ValueError`."""

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        with clear_errors():
            return method(*args, **kwargs)

    return wrapped
