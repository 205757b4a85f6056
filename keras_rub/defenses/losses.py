"""The user's loss as a loss of logits, and what a margin bound asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.classifier import HEADS

_CATEGORICAL = {
    "sparse_categorical_crossentropy": (
        keras.losses.SparseCategoricalCrossentropy
    ),
    "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "categorical_focal_crossentropy": (
        keras.losses.CategoricalFocalCrossentropy
    ),
}
_BINARY = {
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
    "binary_focal_crossentropy": keras.losses.BinaryFocalCrossentropy,
}
_KNOWN = {**_CATEGORICAL, **_BINARY}
_NAMES = {**_KNOWN, **{kind.__name__: kind for kind in _KNOWN.values()}}
_FUNCTIONS = {
    getattr(keras.losses, name): kind for name, kind in _KNOWN.items()
}

# Logits on which a loss is tried.
_TRIALS = 8
_SCALES = (1.0, 3.0, 6.0)


def on_logits(
    loss: Any, head: str | None, width: int | None, head_is_seen: bool
) -> Any:
    """The same loss, as a function of what comes before the head.

    Cross entropies are taken on the logits themselves. Any other loss is
    applied to the user's own outputs, which are made of the logits.

    Args:
        loss: name, function or `keras.losses.Loss`, as passed to `compile`.
        head: `"softmax"`, `"log_softmax"`, `"sigmoid"` or `None`.
        width: int, or `None` if not known yet. Outputs of the network.
        head_is_seen: bool. Whether a head of `None` means that there is none.

    Raises:
        ValueError: if it is open what the loss shall mean.
    """
    if loss is None:
        return None
    named = isinstance(loss, str) and loss in _NAMES
    if named:
        kind = _NAMES[loss]
    elif callable(loss) and not isinstance(loss, keras.losses.Loss):
        kind = _FUNCTIONS.get(loss)
    else:
        kind = type(loss) if type(loss) in _KNOWN.values() else None
    if kind is None:
        return loss if head is None else _behind_head(loss, head)
    settings = {}
    if isinstance(loss, keras.losses.Loss):
        settings = loss.get_config()
    _check_family(loss, kind, head, width)
    if not named:
        given = settings.get("from_logits", False)
        if head is None and not head_is_seen:
            return loss
        _check_from_logits(loss, given, head)
    return kind.from_config({**settings, "from_logits": True})


def _check_family(loss, kind, head, width) -> None:
    binary = kind in _BINARY.values()
    if binary == (head == "sigmoid") and head is not None:
        return
    if head is None and (binary or width != 1):
        return
    if binary:
        wanted = "a categorical cross entropy"
    elif width == 1:
        wanted = "a binary cross entropy"
    else:
        wanted = "a binary cross entropy, or a softmax in the sigmoid's place"
    what = "single output" if head is None else f"final {head}"
    raise ValueError(
        f"`loss` does not fit the {what} of `base`: use {wanted}. "
        f"Received: `loss={_name(loss)}`"
    )


def _check_from_logits(loss, given, head) -> None:
    if head == "log_softmax":
        # Cross entropy on logits takes log_softmax of them, which changes
        # nothing the second time.
        if given:
            return
        text = "`base` returns log-probabilities: set `from_logits=True`"
    elif head is not None:
        if not given:
            return
        text = (
            f"`base` ends with {head}, but `loss` expects logits: set "
            f"`from_logits=False`, or take the {head} off"
        )
    else:
        if given:
            return
        text = (
            "`loss` expects probabilities, but `base` returns logits: set "
            "`from_logits=True`, or add a softmax or sigmoid to `base`"
        )
    raise ValueError(
        f"{text}. Received: `loss={_name(loss)}` with `from_logits={given}`"
    )


def _name(loss) -> str:
    name = getattr(loss, "name", getattr(loss, "__name__", loss))
    return repr(name)


def _behind_head(loss, head: str):
    """A loss of the user's outputs as one of the logits."""
    outputs = HEADS[head]
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        return _LossBehindHead(loss, outputs)

    def behind_head(y_true, y_pred):
        return loss(y_true, outputs(y_pred))

    behind_head.__name__ = getattr(loss, "__name__", "loss")
    return behind_head


class _LossBehindHead(keras.losses.Loss):
    def __init__(self, loss, outputs):
        super().__init__(
            name=loss.name, reduction=loss.reduction, dtype=loss.dtype
        )
        self._loss, self._outputs = loss, outputs

    def call(self, y_true, y_pred):
        return self._loss.call(y_true, self._outputs(y_pred))


def grows_with_margins(loss: Callable, num_classes: int) -> bool:
    """Whether a loss of logits [batch, K] can be bounded by margins.

    It must depend on differences of logits and grow with each z_k - z_y. It
    is tried on a few logits, so this works for a user's own loss too.
    """
    rng = np.random.default_rng(0)
    label = num_classes - 1
    eye = np.eye(num_classes)
    rivals = rng.permutation(num_classes - 1)[:4]
    # Far below 0 a smoothed label pulls a margin up again.
    starts = [np.where(eye[label] == 1, 0.0, -10.0)]
    steps = [5.0]
    shifted = []
    for scale in _SCALES:
        for _ in range(_TRIALS):
            logits = rng.normal(scale=scale, size=num_classes)
            shifted.append(logits)
            starts.append(logits - logits[label])
            steps.append(1.0)
    for y in (label, eye[label].astype("float32")):

        def value(rows, y=y):
            rows = tf.constant(rows, tf.float32)
            return _by_sample(loss, tf.constant([y] * len(rows)), rows)

        try:
            at_start, at_logits = value(starts), value(shifted)
            raised = [
                value(
                    [s + d * eye[k] for s, d in zip(starts, steps, strict=True)]
                )
                for k in rivals
            ]
        except Exception:  # the loss wants labels of the other form
            continue
        growth = np.stack(raised) - at_start
        tolerance = 1e-5 * (1.0 + np.abs(at_start))
        if (
            np.allclose(at_logits, at_start[1:], rtol=1e-4, atol=1e-5)
            and np.all(growth > -tolerance)
            and np.any(growth > tolerance)
        ):
            return True
    return False


def grows_away_from_label(loss: Callable) -> bool:
    """The same for one output [batch, 1]: falls for label 1, grows for 0."""
    outputs = tf.constant(np.linspace(-12.0, 12.0, 49)[:, None], tf.float32)
    for label in (0.0, 1.0):
        labels = tf.fill([len(outputs), 1], label)
        try:
            values = _by_sample(loss, labels, outputs)
        except Exception:  # made for other shapes
            return False
        growth = np.diff(values) * (1.0 - 2.0 * label)
        if not np.all(growth > -1e-5) or not np.any(growth > 1e-5):
            return False
    return True


def _by_sample(loss, labels, outputs) -> np.ndarray:
    """The loss of each row, whatever its reduction."""
    plain = loss.call if isinstance(loss, keras.losses.Loss) else loss
    values = np.asarray(plain(labels, outputs))
    if values.shape == (len(outputs),):
        return values
    rows = [
        plain(labels[i : i + 1], outputs[i : i + 1])
        for i in range(len(outputs))
    ]
    return np.array([float(keras.ops.mean(row)) for row in rows])
