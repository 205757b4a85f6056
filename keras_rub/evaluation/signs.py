"""Signs of false safety: figures that look better than the model is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.attacks import PAPER, make
from keras_rub.attacks.ascent import gradient_of
from keras_rub.attacks.projections import project
from keras_rub.categories import random_switches
from keras_rub.classifier import base_of, input_shape, logits_of
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import PerturbationSet
from keras_rub.tracing import compiled

if TYPE_CHECKING:
    from keras_rub.evaluation.result import Evaluation

_RANDOM_POINTS = 20  # tried for each sample, at the largest radius
_FAR_BELOW = 0.10  # of accuracy, between the strongest attack and the paper's
_FEW = 0.01  # share of the samples that is worth a warning
_MANY = 0.10
_HUGE = 100.0  # without a valid range: this many times the largest input


@dataclasses.dataclass(frozen=True, eq=False)
class Signs:
    """What was looked at, sample by sample.

    Attributes:
        zero_gradient: boolean array [n]. The cross entropy has no gradient
            at all at the clean input.
        random_breaks: dict from the norm to a boolean array [n]: a random
            point at the largest radius is misclassified.
        survives_huge: boolean array [n], or `None` if it was not tried:
            still right under PGD with a huge radius.
        probabilities: whether the outputs look like probabilities.
    """

    zero_gradient: np.ndarray
    random_breaks: dict[str, np.ndarray]
    survives_huge: np.ndarray | None
    probabilities: bool

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Signs:
        """The signs that `dataclasses.asdict` described."""
        huge = state["survives_huge"]
        return cls(
            zero_gradient=np.array(state["zero_gradient"], bool),
            random_breaks={
                norm: np.array(found, bool)
                for norm, found in state["random_breaks"].items()
            },
            survives_huge=None if huge is None else np.array(huge, bool),
            probabilities=bool(state["probabilities"]),
        )

    @classmethod
    def merge(cls, parts: Sequence[Signs]) -> Signs:
        """The signs of all samples together."""
        huge = [p.survives_huge for p in parts if p.survives_huge is not None]
        return cls(
            zero_gradient=np.concatenate([p.zero_gradient for p in parts]),
            random_breaks={
                norm: np.concatenate([p.random_breaks[norm] for p in parts])
                for norm in parts[0].random_breaks
            },
            survives_huge=(
                np.concatenate(huge) if len(huge) == len(parts) else None
            ),
            probabilities=all(p.probabilities for p in parts),
        )


def look(
    model: keras.Model,
    x: np.ndarray,
    labels: np.ndarray,
    sets: dict[str, PerturbationSet],
    largest: dict[str, float],
    batch_size: int,
    seed: int,
) -> Signs:
    """Looks for the signs.

    Args:
        model: the classifier.
        x: float32 array [n, *features], of several inputs the packed one.
        labels: int array [n].
        sets: the perturbation set of each norm.
        largest: the largest radius of each norm.
        batch_size: samples that are worked on together.
        seed: of the random points.
    """
    base, some = base_of(model), next(iter(sets.values()))
    single = SingleInput.of(base, some)
    watcher = _Watcher(single)
    moves = {
        norm: SingleInput.of(base, found).perturbations
        for norm, found in sets.items()
    }
    batches = [
        (x[first : first + batch_size], labels[first : first + batch_size])
        for first in range(0, len(x), batch_size)
    ]
    zero = [watcher.zero_gradient(*batch).numpy() for batch in batches]
    logits = np.concatenate([watcher.logits(b).numpy() for b, _ in batches])
    rng = np.random.default_rng(seed)
    breaks = {
        norm: np.concatenate(
            [
                _random_breaks(watcher, batch, moves[norm], largest[norm], rng)
                for batch in batches
            ]
        )
        for norm in sets
    }
    return Signs(
        zero_gradient=np.concatenate(zero),
        random_breaks=breaks,
        # What can't move may well tell the class.
        survives_huge=None
        if single.perturbations.mask is not None or some.categories
        else _survives_huge(model, x, labels, some, batch_size),
        probabilities=_look_like_probabilities(logits),
    )


def _look_like_probabilities(logits) -> bool:
    if logits.shape[-1] == 2 and not np.any(logits[:, 0]):
        # One output z, which stands for [0, z].
        return bool(np.all((logits >= 0) & (logits <= 1)))
    sums = logits.sum(axis=-1)
    return bool(logits.min() >= 0 and np.allclose(sums, 1.0, atol=1e-3))


class _Watcher:
    """Compiled looks at one model."""

    def __init__(self, single):
        self.single = single
        shape = input_shape(single.network)
        points = tf.TensorSpec([None, *shape], tf.float32)
        labels = tf.TensorSpec([None], tf.int32)
        self.zero_gradient = compiled(
            self._zero_gradient, input_signature=[points, labels]
        )
        self.logits = compiled(self._logits, input_signature=[points])

    def _logits(self, x):
        return tf.cast(logits_of(self.single.network, x), tf.float32)

    def _zero_gradient(self, x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, self._logits(x)
            )
        gradient = gradient_of(tape, loss, x)
        gradient = self.single.moved(gradient)
        axes = list(range(1, len(gradient.shape)))
        return tf.reduce_all(gradient == 0.0, axis=axes)


def _random_breaks(watcher, batch, perturbations, rho, rng):
    x, labels = batch
    broken = np.zeros(len(x), bool)
    for _ in range(_RANDOM_POINTS):
        d = rng.normal(size=x.shape).astype("float32")
        if perturbations.mask is not None:
            d *= perturbations.mask
        flat = d.reshape(len(x), -1)
        if perturbations.norm == "inf":
            flat[:] = rho * np.sign(flat)
        elif perturbations.norm == 2:
            length = np.linalg.norm(flat, axis=1, keepdims=True)
            flat *= rho / np.maximum(length, 1e-12)
        else:
            # One feature takes it all: a vertex of the ball.
            keep = np.argmax(np.abs(flat), axis=1)
            sign = np.sign(flat[np.arange(len(x)), keep])
            flat[:] = 0.0
            flat[np.arange(len(x)), keep] = rho * sign
        start, left = x, np.full(len(x), rho, "float32")
        if perturbations.categories:
            start, left = _switched(x, left, perturbations, rng)
        points = start + project(
            tf.constant(d), tf.constant(start), tf.constant(left), perturbations
        )
        broken |= watcher.logits(points).numpy().argmax(axis=-1) != labels
    return broken


def _switched(x, rho, perturbations, rng):
    """Random switches of each row, and what they leave of the radii."""
    up, down = (
        part.numpy().reshape(len(x), -1)
        for part in perturbations.room(tf.constant(x))
    )
    rows, left = x.copy(), rho.copy()
    for number, row in enumerate(x):
        found, spent = random_switches(
            perturbations.categories,
            row.reshape(-1),
            float(rho[number]),
            (up[number], down[number]),
            rng,
        )
        rows[number] = found.reshape(row.shape)
        left[number] = max(rho[number] - spent, 0.0)
    return rows, left


def _survives_huge(model, x, labels, perturbations, batch_size):
    if perturbations.input_range is None:
        rho = _HUGE * max(1.0, float(np.abs(x).max()))
    else:
        low, high = perturbations.input_range
        rho = float(np.max(np.asarray(high) - np.asarray(low)))
    attack = make(
        "pgd",
        model,
        perturbations=PerturbationSet(
            "inf", input_range=perturbations.input_range
        ),
        batch_size=batch_size,
    )
    return attack.predict(attack(x, labels, rho)) == labels


def warnings_of(result: Evaluation) -> list[str]:
    """What speaks against trusting the figures, in words."""
    found = []
    for norm, radii in result.radii.items():
        found += _warnings_of_norm(result, norm, np.array(radii))
    if result.signs is not None:
        found = [*_warnings_of_samples(result), *found]
    return found


def _warnings_of_samples(result):
    right = result.predicted == result.labels
    if result.signs.probabilities:
        yield (
            "The outputs look like probabilities, but no softmax or sigmoid "
            "can be seen at the end of the model. Attacks and certificates "
            "take them for logits: return logits."
        )
    share = np.mean(result.signs.zero_gradient[right]) if right.any() else 0.0
    if share > _FEW:
        yield (
            f"Zero gradients: the cross entropy of {share:.0%} of the samples "
            "does not change with the input, so gradient attacks on it are "
            "blind there. Trust the margin-ratio attacks and certificates only."
        )
    huge = result.signs.survives_huge
    if huge is not None:
        chance = np.bincount(result.labels).max() / len(result)
        if np.mean(huge) > chance + _MANY:
            yield (
                f"Accuracy stays at {np.mean(huge):.0%} under PGD with a huge "
                "radius, where any model can be broken: the attack fails, the "
                "model does not resist (gradient masking)."
            )


def _warnings_of_norm(result, norm, radii):
    worst = result.worst(norm)
    if norm in result.certified:
        both = (result.certified[norm] & ~worst).sum(axis=1)
        for rho, count in zip(radii, both, strict=True):
            if count:
                yield (
                    f"L{norm}, rho={rho:g}: {count} samples are certified and "
                    "broken by an attack. This is a bug: please report it."
                )
    attacks = result.standing[norm]
    if not attacks:
        return
    last = int(np.argmax(radii))
    beaten = 0.0
    if result.signs is not None:
        beaten = np.mean(worst[last] & result.signs.random_breaks[norm])
    if beaten > _FEW:
        yield (
            f"L{norm}, rho={radii[last]:g}: random points break {beaten:.0%} "
            "of the samples that the gradient attacks left standing "
            "(gradient masking)."
        )
    if set(PAPER) < set(attacks):
        paper = np.min([attacks[n].mean(axis=1) for n in PAPER], axis=0)
        gap = paper - worst.mean(axis=1)
        at = int(np.argmax(gap))
        if gap[at] > _FAR_BELOW:
            yield (
                f"L{norm}, rho={radii[at]:g}: the strong attacks leave "
                f"{worst[at].mean():.0%}, the paper's {paper[at]:.0%}. Report "
                "the smaller figure."
            )
