"""Runs attacks and certificates on a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_rub import attacks as attack_module
from keras_rub import checks
from keras_rub.attacks.attack import check_radii
from keras_rub.attacks.suite import names_of
from keras_rub.bounds import UnsupportedLayerError, certify
from keras_rub.bounds.engine import METHODS
from keras_rub.evaluation import signs
from keras_rub.evaluation.result import Evaluation
from keras_rub.progress import Progress
from keras_rub.uncertainty import PerturbationSet, canonical_norm, flat_size

# A point may leave the ball by this much, relatively: float32 rounding.
_SLACK = 1e-4


def evaluate(
    model: keras.Model,
    x: Any,
    y: Any,
    *,
    radii: Sequence[float] | dict[Any, Sequence[float]],
    norms: Iterable[int | str] = (1, 2, "inf"),
    attacks: str | Iterable[str] = "paper",
    certificates: bool | str = True,
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    examples: int = 6,
    diagnosis: bool = True,
    batch_size: int = 256,
    seed: int = 0,
    verbose: int | str = "auto",
) -> Evaluation:
    """Clean, attacked and certified accuracy, per norm and radius.

    Args:
        model: a robust model or any built Keras classifier with logits.
        x: array [n, *features].
        y: class numbers [n] or one-hot rows [n, K].
        radii: list of radii for all norms, or a dict from the norm to its
            own list. A radius means itself, in the units of the model's
            input; see `paper_radius` for the paper's numbers.
        norms: the norms. Defaults to `(1, 2, "inf")`.
        attacks: `"paper"` (foolbox's FGM and PGD), `"strong"` (those, and
            adaptive ones), or a list of `keras_rub.attacks.NAMES`; an empty
            list for none. Defaults to `"paper"`.
        certificates: bool, or a method of `keras_rub.certify`. Whether to
            certify, where the layers allow. Defaults to `True`, `"auto"`.
        input_range: pair `(low, high)`, or `None`. The valid inputs, for
            attacks and certificates. Defaults to `None`.
        mask: boolean array that broadcasts to one input, or `None`. The
            features that may change. Defaults to `None`.
        weights: positive array that broadcasts to one input, or `None`. The
            cost of moving each feature by one unit. Defaults to `None`.
        examples: int. Attacked samples to keep for pictures. Defaults to
            `6`.
        diagnosis: bool. Whether to look for signs of false safety, at the
            cost of about one more attack; without, `warnings` knows less.
            Defaults to `True`.
        batch_size: int. Samples that are attacked together. Defaults to
            `256`.
        seed: int. Of random starts and points. Defaults to `0`.
        verbose: 0, 1 or `"auto"`, a progress bar for long runs only.
            Defaults to `"auto"`.

    Returns:
        An `Evaluation`: printed, it is a table, with warnings below it.

    Example:
    ```python
    result = keras_rub.evaluate(
        model, x_test, y_test, radii=[0.5, 1.0], norms=[1], attacks="strong"
    )
    print(result)
    ```
    """
    norms = [canonical_norm(norm) for norm in norms]
    if not norms:
        raise ValueError("`norms` must hold at least one norm. Received: none")
    radii_of = _radii_by_norm(radii, norms)
    method = _method(certificates)
    limits = {"input_range": input_range, "mask": mask, "weights": weights}
    options = {**limits, "batch_size": batch_size, "seed": seed}
    suites = {
        norm: attack_module.Suite(model, norm, attacks, **options).attacks
        if names_of(attacks)
        else {}
        for norm in norms
    }
    probe = attack_module.make("pgd", model, norms[0], **options)
    with checks.clear_errors():
        x, labels = probe.check_samples(x, y)
        predicted = probe.predict(x)
        tasks = sum(len(suite) for suite in suites.values()) + 1
        tasks += len(norms) if method else 0
        progress = _Tasks(len(x), tasks, verbose)
        standing, kept, certified, notes = {}, {}, {}, []
        for norm in norms:
            standing[str(norm)], kept[str(norm)] = _attack(
                suites[norm], x, labels, predicted, radii_of[norm],
                examples, progress,
            )  # fmt: skip
            if method:
                try:
                    certified[str(norm)] = _certify(
                        model, x, labels, radii_of[norm], norm, method, limits
                    )
                except UnsupportedLayerError as error:
                    notes.append(f"No certificate for L{norm}: {error}")
                progress.done()
        found = None
        if diagnosis:
            found = signs.look(
                model,
                x,
                labels,
                {str(n): PerturbationSet(n, **limits) for n in norms},
                {str(n): max(radii_of[n]) for n in norms},
                batch_size,
                seed,
            )
        progress.done()
    return Evaluation(
        labels=labels,
        predicted=predicted,
        radii={str(norm): radii_of[norm] for norm in norms},
        standing=standing,
        certified=certified,
        signs=found,
        examples=kept,
        notes=tuple(notes),
    )


def paper_radius(number: float, norm: int | str, input_shape: Sequence[int]):
    """The radius that a number of the paper's hyper-parameters means.

    Its code scales the number by the square root of the number of features
    for L1, so that 0.01 on MNIST is a radius of 0.28, and takes it as it is
    for the other norms.

    Args:
        number: float. As given to the paper's code.
        norm: 1, 2 or `"inf"`.
        input_shape: the shape of one input.
    """
    if canonical_norm(norm) == 1:
        return number * math.sqrt(flat_size(tuple(input_shape)))
    return number


def _method(certificates):
    """The name of the bound, or `None`."""
    method = {True: "auto", False: None}.get(certificates, certificates)
    if method is not None and method not in METHODS:
        raise ValueError(
            f"`certificates` must be True, False or one of {METHODS}. "
            f"Received: `certificates={certificates!r}`"
        )
    return method


class _Tasks:
    """Progress over tasks that each go through all samples."""

    def __init__(self, samples, tasks, verbose):
        self._progress = Progress(samples * tasks, verbose)
        self._samples, self._count = samples, 0

    def done(self):
        self._count += 1
        self._progress.update(self._count * self._samples)


def _radii_by_norm(radii, norms):
    if isinstance(radii, dict):
        radii = {canonical_norm(norm): found for norm, found in radii.items()}
        absent = [norm for norm in norms if norm not in radii]
        if absent:
            raise ValueError(
                f"`radii` has no list for the norms {absent}. "
                f"Received: radii for {list(radii)}"
            )
        return {norm: check_radii(radii[norm]) for norm in norms}
    return dict.fromkeys(norms, check_radii(radii))


def _attack(suite, x, labels, predicted, radii, examples, progress):
    """Who stands under each attack, and a few samples to show."""
    right = predicted == labels
    standing = {}
    middle = int(np.argsort(radii)[len(radii) // 2])
    shown, lost = x.copy(), np.zeros(len(x), bool)
    for name, attack in suite.items():
        found = attack.sweep(x, labels, radii)
        stands = []
        for index, (points, rho) in enumerate(zip(found, radii, strict=True)):
            broken = attack.predict(points) != labels
            broken &= _inside(points, x, rho, attack.perturbations)
            stands.append(right & ~broken)
            if index == middle:
                # A point that breaks the sample, else the last attack's.
                shown[~lost] = points[~lost]
                lost |= broken
        standing[name] = np.stack(stands)
        progress.done()
    if not suite or not examples:
        return standing, []
    # Broken samples first, for they have something to show.
    order = np.argsort(-(1 * right + 1 * (right & lost)), kind="stable")
    order = order[:examples]
    after = attack.predict(shown[order])
    return standing, [
        {
            "clean": x[i],
            "attacked": shown[i],
            "rho": radii[middle],
            "label": int(labels[i]),
            "predicted": int(predicted[i]),
            "predicted_attacked": int(now),
        }
        for i, now in zip(order, after, strict=True)
    ]


def _inside(points, x, rho, perturbations):
    """Whether each point is in the set, up to rounding."""
    d = (points - x).reshape(len(x), -1).astype("float64")
    shape = x.shape[1:]
    if perturbations.weights is not None:
        d = d * np.broadcast_to(perturbations.weights, shape).reshape(-1)
    order = {1: 1, 2: 2, "inf": np.inf}[perturbations.norm]
    fits = np.linalg.norm(d, order, axis=1) <= rho * (1 + _SLACK) + 1e-9
    if perturbations.input_range is not None:
        low, high = perturbations.input_range
        slack = _SLACK * (np.max(high) - np.min(low))
        valid = (points >= low - slack) & (points <= high + slack)
        fits &= valid.reshape(len(x), -1).all(axis=1)
    return fits


def _certify(model, x, labels, radii, norm, method, limits):
    if norm != 1 and method in ("rub", "alpha-rub"):
        raise UnsupportedLayerError(f"{method} is for L1 only")
    table = certify(
        model,
        x,
        labels,
        rho=list(radii),
        norm=norm,
        method=method,
        decide_only=True,
        verbose=0,
        **limits,
    )
    return np.stack([certificate.certified for certificate in table])
