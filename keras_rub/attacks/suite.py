"""Attacks by name, and several of them as one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_rub import checks
from keras_rub.attacks.adaptive_pgd import AdaptivePGD
from keras_rub.attacks.attack import Attack, check_radii
from keras_rub.attacks.foolbox_attack import FoolboxAttack, can_respect
from keras_rub.attacks.pgd import PGD
from keras_rub.attacks.switch_attack import SwitchAttack
from keras_rub.classifier import base_of
from keras_rub.perturbations import PerturbationSet, attacker_of

_MAKERS = {
    "foolbox-fgm": lambda *args, **kw: FoolboxAttack(*args, kind="fgm", **kw),
    "foolbox-pgd": lambda *args, **kw: FoolboxAttack(*args, kind="pgd", **kw),
    "fgm": lambda *args, **kw: PGD(
        *args, steps=1, step_size=1.0, random_start=False, **kw
    ),
    "pgd": PGD,
    "apgd-ce": AdaptivePGD,
    "apgd-ratio": lambda *args, **kw: AdaptivePGD(
        *args, loss="margin_ratio", restarts=2, **kw
    ),
    "apgd-targeted": lambda *args, **kw: AdaptivePGD(
        *args, loss="margin_ratio", classes=4, **kw
    ),
    "switch": SwitchAttack,
}

NAMES = tuple(_MAKERS)
PAPER = ("foolbox-fgm", "foolbox-pgd")
STRONG = (*PAPER, "pgd", "apgd-ce", "apgd-ratio", "apgd-targeted")


def names_of(attacks: str | Iterable[str]) -> tuple[str, ...]:
    """The names that `"paper"`, `"strong"`, one name or a list stand for."""
    groups = {"paper": PAPER, "strong": STRONG}
    if isinstance(attacks, str):
        attacks = groups.get(attacks, (attacks,))
    attacks = tuple(attacks)
    for name in attacks:
        if name not in _MAKERS:
            near = difflib.get_close_matches(str(name), NAMES, n=1)
            raise ValueError(
                f"Unknown attack {name!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
                + f" Known: {', '.join(NAMES)}; groups: paper, strong."
            )
    return attacks


def make(
    name: str,
    model: keras.Model,
    norm: int | str | None = None,
    *,
    perturbations: PerturbationSet | None = None,
    input_range: tuple[Any, Any] | None = None,
    mask: Any = None,
    weights: Any = None,
    perturb: str | None = None,
    categories: Any = None,
    **kwargs: Any,
) -> Attack:
    """An attack by its name.

    The same arguments give the same attack again, so that nothing is compiled
    twice for one model.

    Args:
        name: one of `keras_rub.attacks.NAMES`.
        model: a robust model or any built Keras classifier.
        norm: as in `Attack`.
        perturbations: as in `Attack`.
        input_range: as in `Attack`.
        mask: as in `Attack`.
        weights: as in `Attack`.
        perturb: as in `Attack`.
        categories: as in `Attack`.
        **kwargs: other arguments of the attack.
    """
    (name,) = names_of(name)
    if name in PAPER:
        kwargs.pop("seed", None)
    attacker = attacker_of(
        model,
        perturbations,
        default_norm="inf",
        norm=norm,
        input_range=input_range,
        mask=mask,
        weights=weights,
        perturb=perturb,
        categories=categories,
    )
    key = (name, attacker.key, repr(sorted(kwargs.items())))
    # Kept with the model, past Keras's tracking, so that it lives as long.
    known = base_of(model).__dict__.setdefault("_keras_rub_attacks", {})
    if key not in known:
        known[key] = _MAKERS[name](model, perturbations=attacker, **kwargs)
    return known[key]


class Suite:
    """Several attacks as one: each tries the samples that still stand.

    Args:
        model: a robust model or any built Keras classifier.
        norm: as in `Attack`.
        attacks: `"paper"`, `"strong"`, or a list of names. Foolbox's attacks
            are left out of `"strong"` where there is a mask or weights, or a
            range for each feature, which they can't respect. Where there are
            categories, `"switch"` is the first of `"strong"`, and the others
            leave their columns alone. Defaults to `"strong"`.
        perturbations: as in `Attack`.
        input_range: as in `Attack`.
        mask: as in `Attack`.
        weights: as in `Attack`.
        perturb: as in `Attack`.
        categories: as in `Attack`.
        **kwargs: `batch_size` and `seed` of the attacks.

    Example:
    ```python
    strong = keras_rub.attacks.Suite(model, norm=1, input_range=(0, 1))
    x_attacked = strong(x_test, y_test, rho=2.0)
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        attacks: str | Iterable[str] = "strong",
        *,
        perturbations: PerturbationSet | None = None,
        input_range: tuple[Any, Any] | None = None,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        categories: Any = None,
        **kwargs: Any,
    ):
        names = names_of(attacks)
        attacker = attacker_of(
            model,
            perturbations,
            default_norm="inf",
            norm=norm,
            input_range=input_range,
            mask=mask,
            weights=weights,
            perturb=perturb,
            categories=categories,
        )
        if attacks == "strong" and not can_respect(attacker):
            names = tuple(name for name in names if name not in PAPER)
        if attacks == "strong" and attacker.categories:
            names = ("switch", *names)
        self.attacks = {
            name: make(name, model, perturbations=attacker, **kwargs)
            for name in names
        }

    def __call__(self, x: Any, y: Any, rho: Any) -> Any:
        """Attacks every sample; arguments and result as of `Attack`."""
        given = x
        first = next(iter(self.attacks.values()))
        with checks.clear_errors():
            x, labels = first.check_samples(x, y)
        rho = np.broadcast_to(np.asarray(rho, "float32"), len(x))
        check_radii(rho)
        points = x.copy()
        left = np.flatnonzero(first.predict(x) == labels)
        for attack in self.attacks.values():
            if not len(left):
                break
            points[left] = attack(x[left], labels[left], rho[left])
            stands = attack.predict(points[left]) == labels[left]
            left = left[stands]
        return first.inputs.unpack(points, given)
