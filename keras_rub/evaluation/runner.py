"""Runs attacks and certificates on a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import attacks as attack_module
from keras_rub import checks
from keras_rub.attacks.attack import check_radii
from keras_rub.attacks.suite import names_of
from keras_rub.bounds import UnsupportedLayerError, certify, methods
from keras_rub.classifier import base_of
from keras_rub.evaluation import signs
from keras_rub.evaluation.result import Evaluation
from keras_rub.inputs import SingleInput
from keras_rub.perturbations import (
    NORMS,
    PerturbationSet,
    attacker_of,
    canonical_norm,
)
from keras_rub.progress import Progress


def evaluate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    radii: Sequence[float] | Mapping[Any, Sequence[float]],
    norms: Iterable[int | str] | None = None,
    attacks: str | Iterable[str] = "paper",
    certificates: bool | str = True,
    perturbations: PerturbationSet | None = None,
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    perturb: str | None = None,
    categories: Any = None,
    examples: int = 6,
    diagnosis: bool = True,
    batch_size: int = 256,
    seed: int = 0,
    verbose: int | str = "auto",
) -> Evaluation:
    """Clean, attacked and certified accuracy, per norm and radius.

    Args:
        model: a robust model or any built Keras classifier.
        x: array [n, *features], or a `tf.data.Dataset` of batches `(x, y)`;
            where the model takes several inputs, a dict by name or a list of
            arrays.
        y: class numbers [n] or one-hot rows [n, K]. Defaults to `None`: those
            of the data set.
        radii: list of radii for all norms, or a dict from the norm to its
            own list. A radius means itself, in the units of the model's
            input; see `paper_radius` for the paper's numbers.
        norms: list of norms. Defaults to `None`: those of the dict `radii`;
            else that of `perturbations` or of a robust model; else all three.
        attacks: `"paper"` (foolbox's FGM and PGD), `"strong"` (those, and
            adaptive ones), or a list of `keras_rub.attacks.NAMES`; an empty
            list for none. Defaults to `"paper"`.
        certificates: bool, or a method of `keras_rub.certify`. Whether to
            certify, where the layers allow. Defaults to `True`, `"auto"`.
        perturbations: as in `keras_rub.certify`, for attacks and
            certificates; its norm counts where `norms` says nothing.
        input_range: as in `keras_rub.certify`.
        mask: as in `keras_rub.certify`.
        weights: as in `keras_rub.certify`.
        perturb: as in `keras_rub.certify`.
        categories: as in `keras_rub.certify`.
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
    attacker = attacker_of(
        model,
        perturbations,
        input_range=input_range,
        mask=mask,
        weights=weights,
        perturb=perturb,
        categories=categories,
    )
    single = SingleInput.of(base_of(model), attacker)
    # Packed once: all that follows takes such arrays too.
    x, y = _arrays(single, x, y)
    sets = {
        norm: attacker.with_norm(norm)
        for norm in _norms(norms, radii, model, perturbations)
    }
    radii_of = _radii_by_norm(radii, list(sets))
    method = _method(certificates)
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
    suites = {
        norm: attack_module.Suite(
            model, attacks=attacks, perturbations=found, **options
        ).attacks
        if names_of(attacks)
        else {}
        for norm, found in sets.items()
    }
    probe = attack_module.make(
        "pgd", model, perturbations=next(iter(sets.values())), **options
    )
    with checks.clear_errors():
        x, labels = probe.check_samples(x, y)
        predicted = probe.predict(x)
        tasks = sum(len(suite) for suite in suites.values()) + 1
        tasks += len(sets) if method else 0
        progress = _Tasks(len(x), tasks, verbose)
        standing, kept, certified, notes = {}, {}, {}, []
        for norm, found in sets.items():
            standing[str(norm)], kept[str(norm)] = _attack(
                suites[norm], x, labels, predicted, radii_of[norm],
                examples, progress, single,
            )  # fmt: skip
            if method:
                try:
                    certified[str(norm)] = _certify(
                        model, x, labels, radii_of[norm], found, method
                    )
                except UnsupportedLayerError as error:
                    notes.append(f"No certificate for L{norm}: {error}")
                progress.done()
        seen = None
        if diagnosis:
            seen = signs.look(
                model,
                x,
                labels,
                {str(norm): found for norm, found in sets.items()},
                {str(norm): max(radii_of[norm]) for norm in sets},
                batch_size,
                seed,
            )
        progress.done()
    return Evaluation(
        labels=labels,
        predicted=predicted,
        radii={str(norm): radii_of[norm] for norm in sets},
        perturbations=attacker,
        standing=standing,
        certified=certified,
        signs=seen,
        examples=kept,
        notes=tuple(notes),
    )


def _arrays(single: SingleInput, x, y) -> tuple[Any, Any]:
    """The samples of a data set, or these, as one array each."""
    if not isinstance(x, tf.data.Dataset):
        if y is None:
            raise ValueError(
                "`y` must hold the true classes: accuracy can't be told "
                "without. Received: `y=None`"
            )
        return single.array(x), y
    if y is not None:
        raise ValueError(
            "`y` must be None when `x` is a tf.data.Dataset, which holds its "
            "own labels."
        )
    pairs = [pair for pair in x if isinstance(pair, (tuple, list))]
    if not pairs or len(pairs[0]) < 2:
        raise ValueError(
            "`x` must be a tf.data.Dataset of batches `(x, y)`. "
            f"Received: elements {x.element_spec}"
        )
    return (
        np.concatenate([single.array(pair[0]) for pair in pairs]),
        np.concatenate([np.asarray(pair[1]) for pair in pairs]),
    )


def _norms(norms, radii, model, perturbations) -> list[int | str]:
    if norms is None:
        if isinstance(radii, Mapping):
            norms = radii
        elif perturbations is not None:
            norms = [perturbations.norm]
        else:
            norms = [model.norm] if base_of(model) is not model else NORMS
    norms = [canonical_norm(norm) for norm in norms]
    if not norms:
        raise ValueError("`norms` must hold at least one norm. Received: none")
    return norms


def _method(certificates):
    """The name of the bound, or `None`."""
    if isinstance(certificates, bool):
        return "auto" if certificates else None
    return methods.find(certificates, argument="certificates").name


class _Tasks:
    """Progress over tasks that each go through all samples."""

    def __init__(self, samples, tasks, verbose):
        self._progress = Progress(samples * tasks, verbose)
        self._samples, self._count = samples, 0

    def done(self):
        self._count += 1
        self._progress.update(self._count * self._samples)


def _radii_by_norm(radii, norms):
    if isinstance(radii, Mapping):
        radii = {canonical_norm(norm): found for norm, found in radii.items()}
        absent = [norm for norm in norms if norm not in radii]
        if absent:
            raise ValueError(
                f"`radii` has no list for the norms {absent}. "
                f"Received: radii for {list(radii)}"
            )
        return {norm: check_radii(radii[norm]) for norm in norms}
    return dict.fromkeys(norms, check_radii(radii))


def _attack(suite, x, labels, predicted, radii, examples, progress, single):
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
            broken &= attack.perturbations.contains(x, points, rho)
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
            "clean": single.moved(x[[i]])[0],
            "attacked": single.moved(shown[[i]])[0],
            "rho": radii[middle],
            "label": int(labels[i]),
            "predicted": int(predicted[i]),
            "predicted_attacked": int(now),
        }
        for i, now in zip(order, after, strict=True)
    ]


def _certify(model, x, labels, radii, attacker, method):
    if attacker.norm not in methods.METHODS[method].norms:
        raise UnsupportedLayerError(f"{method} can't do this norm")
    table = certify(
        model,
        x,
        labels,
        rho=list(radii),
        perturbations=attacker,
        method=method,
        decide_only=True,
        verbose=0,
    )
    return np.stack([certificate.certified for certificate in table])
