"""What all attacks share: checks, batches, restarts, one compiled core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import checks, tracing
from keras_rub.attacks.losses import LOSSES, has_won, strongest_rival
from keras_rub.classifier import base_of, input_shape, logits_of
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import PerturbationSet, attacker_of, check_rho

LABELS = tf.TensorSpec([None], tf.int32)
RADII = tf.TensorSpec([None], tf.float32)
SEED = tf.TensorSpec([2], tf.int32)


class Attack:
    """Looks for points of a perturbation set that a model gets wrong.

    An attack belongs to one model, because what TensorFlow compiles for it
    does; make it once, and call it as often as needed.

    Args:
        model: a robust model or any built Keras classifier; it is
            attacked at its logits, before a final softmax or sigmoid.
        norm: 1, 2 or `"inf"`. Shorthand, as are `input_range`, `mask`,
            `weights`, `perturb` and `categories`: each takes the place of
            that part of the attacker. Defaults to `None`.
        perturbations: `PerturbationSet`, or `None`. The whole attacker.
            Defaults to `None`: that of a robust model, as it was trained;
            for any other model the Linf ball.
        loss: `"cross_entropy"`, `"log_odds"` or `"margin_ratio"`, what is
            raised. The log odds lead the same way as the cross entropy, and
            go on where it is flat in float32. Defaults to `"cross_entropy"`.
        restarts: int. Runs, each on the samples that still stand. Defaults
            to `1`.
        input_range: pair `(low, high)`, or `None`. The valid inputs, which
            the attack does not leave. Defaults to `None`.
        mask: boolean array that broadcasts to one input, or `None`. The
            features that may change. Defaults to `None`, all of them.
        weights: positive array that broadcasts to one input, or `None`. The
            cost of moving each feature by one unit. Defaults to `None`.
        perturb: string, or `None`. Where the model takes several inputs, the
            name of the one that is attacked. Defaults to `None`, the only one
            of floating point.
        categories: list of `keras_rub.Category` and `keras_rub.Ordinal`, or
            `None`. Only the attack `"switch"` switches them; the others
            leave their columns alone. Defaults to `None`.
        batch_size: int. Samples that are attacked together. Defaults to
            `256`.
        seed: int. Decides all random choices. Defaults to `0`.
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        *,
        perturbations: PerturbationSet | None = None,
        loss: str = "cross_entropy",
        restarts: int = 1,
        input_range: tuple[Any, Any] | None = None,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        categories: Any = None,
        batch_size: int = 256,
        seed: int = 0,
    ):
        self.attacker = attacker_of(
            model,
            perturbations,
            default_norm="inf",
            norm=norm,
            mask=mask,
            weights=weights,
            input_range=input_range,
            perturb=perturb,
            categories=categories,
        )
        self.inputs = SingleInput.of(base_of(model), self.attacker)
        # From here on there is one input tensor.
        self.base = self.inputs.network
        self.perturbations = self.inputs.perturbations
        if loss not in LOSSES:
            raise ValueError(
                f"`loss` must be one of {sorted(LOSSES)}. "
                f"Received: `loss={loss!r}`"
            )
        self.loss = loss
        self.restarts = positive_int("restarts", restarts)
        self.batch_size = positive_int("batch_size", batch_size)
        self.seed = int(seed)
        shape = input_shape(self.base)
        self.perturbations.check_shape(shape)
        self.input_shape = shape
        self.num_classes = logits_of(self.base, tf.zeros([1, *shape])).shape[-1]
        self._predict = self.traced_once(
            lambda points: tf.argmax(self._logits(points), axis=-1), self.points
        )
        self._judge = self.compiled(self.objective, self.points, LABELS)

    @property
    def points(self) -> tf.TensorSpec:
        """Points [batch, *features], as an argument of `compiled`."""
        return tf.TensorSpec([None, *self.input_shape], tf.float32)

    def compiled(
        self, function: Callable, *signature: tf.TensorSpec
    ) -> Callable:
        """Compiles a function for any batch size, without and with targets.

        Args:
            function: takes tensors of the signature, then `targets`: `None`
                or an int32 tensor [batch].
            *signature: `tf.TensorSpec` of all arguments but the last.
        """
        untargeted = self.traced_once(
            lambda *args: function(*args, None), *signature
        )
        targeted = self.traced_once(function, *signature, LABELS)

        def call(*args):
            *others, targets = args
            if targets is None:
                return untargeted(*others)
            return targeted(*others, targets)

        return call

    def traced_once(
        self, function: Callable, *signature: tf.TensorSpec
    ) -> Callable:
        """Compiles a function of this signature, when first called."""

        @functools.cache
        def concrete():
            traced = tracing.compiled(function, input_signature=list(signature))
            return traced.get_concrete_function()

        def call(*args):
            return concrete()(
                *(
                    tf.convert_to_tensor(arg, spec.dtype)
                    for arg, spec in zip(args, signature, strict=True)
                )
            )

        return call

    @property
    def norm(self) -> int | str:
        """The norm of the perturbation: 1, 2 or `"inf"`."""
        return self.perturbations.norm

    def __call__(
        self, x: Any, y: Any, rho: Any, targets: Any = None
    ) -> np.ndarray:
        """Attacks every sample.

        Args:
            x: array [n, *features]; where the model takes several inputs, a
                dict by name or a list of arrays.
            y: class numbers [n] or one-hot rows [n, K]. The true classes.
            rho: float, or one radius a sample [n].
            targets: class numbers [n], or `None`. The classes to be
                predicted instead; a sample whose target is its own class is
                left alone. Defaults to `None`, any other class will do.

        Returns:
            Float32 array [n, *features]: where the attack has won, a point
            that proves it; elsewhere the point with the highest loss. Of
            several inputs all, the others as they were.
        """
        given = x
        with checks.clear_errors():
            x, labels = self.check_samples(x, y)
            rho = _radii(rho, len(x))
            if targets is not None:
                targets = checks.class_labels(targets, self.num_classes).numpy()
                if len(targets) != len(x):
                    raise ValueError(
                        "`targets` must hold one class a sample. "
                        f"Received: {len(targets)} for {len(x)} samples"
                    )
            parts = []
            for first in range(0, len(x), self.batch_size):
                some = slice(first, first + self.batch_size)
                parts.append(
                    self._attack_batch(
                        x[some],
                        labels[some],
                        rho[some],
                        None if targets is None else targets[some],
                    )
                )
        return self.inputs.unpack(np.concatenate(parts), given)

    def sweep(self, x: Any, y: Any, radii: Any) -> Any:
        """Attacks every sample at each radius.

        A point that wins at a small radius wins at a larger one too, so a
        sample is attacked again only while it stands.

        Args:
            x: as in a call.
            y: class numbers [n] or one-hot rows [n, K].
            radii: non-empty list of radii.

        Returns:
            Float32 array [len(radii), n, *features]; of several inputs a list
            of what a call returns, one for each radius.
        """
        radii, given = check_radii(radii), x
        with checks.clear_errors():
            x, labels = self.check_samples(x, y)
        found = np.repeat(x[None], len(radii), axis=0)
        points = x.copy()
        standing = self.predict(x) == labels
        for index in np.argsort(radii):
            left = np.flatnonzero(standing)
            if len(left):
                points[left] = self(x[left], labels[left], radii[index])
                standing[left] = self.predict(points[left]) == labels[left]
            found[index] = points
        return self.unpack_all(found, given)

    def unpack_all(self, found: np.ndarray, given: Any) -> Any:
        """Points by radius, in the structure of the inputs `given`."""
        if not isinstance(given, (dict, list, tuple)):
            return found
        return [self.inputs.unpack(points, given) for points in found]

    def predict(self, x: Any) -> np.ndarray:
        """The classes [n] that the model predicts."""
        x = self.inputs.array(x)
        return np.concatenate(
            [
                self._predict(x[first : first + self.batch_size]).numpy()
                for first in range(0, len(x), self.batch_size)
            ]
        )

    def check_samples(self, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """The inputs as float32 and the labels as int32, or an error."""
        x = self.inputs.array(x)
        if x.shape[1:] != self.input_shape or not len(x):
            raise ValueError(
                f"`x` must have the shape [n, "
                f"{', '.join(map(str, self.input_shape))}] with n of at least "
                f"1. Received: shape {x.shape}"
            )
        if len(np.asarray(y)) != len(x):
            raise ValueError(
                "`x` and `y` must have the same length. "
                f"Received: {len(x)} and {len(np.asarray(y))}"
            )
        x = x.astype("float32")
        checks.require_valid(tf.constant(x), self.perturbations)
        return x, checks.class_labels(y, self.num_classes).numpy()

    def objective(
        self,
        points: tf.Tensor,
        labels: tf.Tensor,
        targets: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The loss [batch] at these points, and whether the attack has won."""
        logits = tf.cast(self._logits(points), tf.float32)
        if targets is not None:
            # The target has to beat all others, not the label alone.
            labels = strongest_rival(logits, targets)
        return (
            LOSSES[self.loss](logits, labels, targets),
            has_won(logits, labels, targets),
        )

    def run(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        rho: np.ndarray,
        targets: np.ndarray | None,
        restart: int,
    ) -> tf.Tensor:
        """One run on a batch; what a subclass has to provide.

        Args:
            x: float32 array [batch, *features].
            labels: int32 array [batch].
            rho: float32 array [batch].
            targets: int32 array [batch], or `None`.
            restart: int. 0 in the first run.

        Returns:
            Tensor like `x`, points of the set.
        """
        raise NotImplementedError

    def _attack_batch(self, x, labels, rho, targets):
        points = x.copy()
        if targets is None:
            won = self.predict(x) != labels
        else:
            won = targets == labels
        best = np.full(len(x), -np.inf, "float32")
        for restart in range(self.restarts):
            left = np.flatnonzero(~won)
            if not len(left):
                break
            some = None if targets is None else targets[left]
            found = self.run(x[left], labels[left], rho[left], some, restart)
            value, better = (
                part.numpy() for part in self._judge(found, labels[left], some)
            )
            # A win counts more than any loss.
            value = np.where(better, np.inf, value)
            improved = value > best[left]
            best[left] = np.maximum(value, best[left])
            points[left[improved]] = found.numpy()[improved]
            won[left] |= better
        return points

    def _logits(self, points):
        return self.inputs.logits(points)


def positive_int(name: str, value: Any) -> int:
    """The value as an int of at least 1, or an error."""
    if int(value) != value or value < 1:
        raise ValueError(
            f"`{name}` must be an integer of at least 1. "
            f"Received: `{name}={value!r}`"
        )
    return int(value)


def check_radii(radii: Any) -> list[float]:
    """The radii as floats, or an error."""
    radii = list(np.atleast_1d(radii))
    if not radii:
        raise ValueError("`radii` must hold at least one radius. Received: []")
    return [check_rho(radius, "radii") for radius in radii]


def _radii(rho, count) -> np.ndarray:
    if np.ndim(rho) == 0:
        return np.full(count, check_rho(rho), "float32")
    radii = np.array([check_rho(radius) for radius in rho], "float32")
    if radii.shape != (count,):
        raise ValueError(
            "`rho` must be a number, or hold one radius a sample. "
            f"Received: {len(radii)} radii for {count} samples"
        )
    return radii
