"""What is searched: defences, radii, learning rates and so on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import reprlib
from typing import Any

import keras_tuner
import yaml

from keras_rub.datasets import NORMALIZATIONS
from keras_rub.perturbations import canonical_norm, paper_radius
from keras_rub.training import ARCHITECTURES, DEFENSES, HEADS

# The radii and learning rates that the paper tries.
PAPER_RHO = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 1.0, 3.0, 5.0, 10.0)
PAPER_LEARNING_RATES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The values to try of each hyper-parameter.

    Attributes:
        defense: names of defences with their norm: `"rub"`, `"nominal"`, or
            such as `"arub-1"`, `"pgd-inf"`.
        rho: radii, as the paper gives them: times the square root of the
            number of features for an L1 defence, unless `scaled` is false.
        scaled: whether `rho` is scaled so.
        learning_rate: learning rates.
        batch_size: batch sizes.
        normalization: see `keras_rub.datasets.load`.
        architecture: see `keras_rub.training.ARCHITECTURES`.
        head: see `keras_rub.training.HEADS`.
    """

    defense: tuple[str, ...] = (
        "nominal", "baseline-inf", "fgsm-inf", "pgd-inf", "arub-inf",
        "arub-1", "rub", "coap-inf", "ibp-inf",
    )  # fmt: skip
    rho: tuple[float, ...] = PAPER_RHO
    scaled: bool = True
    learning_rate: tuple[float, ...] = PAPER_LEARNING_RATES
    batch_size: tuple[int, ...] = (32, 256)
    normalization: tuple[str, ...] = ("default",)
    architecture: tuple[str, ...] = ("mlp",)
    head: tuple[str, ...] = ("logits",)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if field.name != "scaled" and not values:
                raise ValueError(
                    f"Search space: {field.name} must hold at least one value."
                )
        if not isinstance(self.scaled, bool):
            raise ValueError(
                "Search space: scaled must be true or false. "
                f"Received: {self.scaled!r}"
            )
        for name in self.defense:
            split_defense(name)
        _check_numbers("rho", self.rho, "at least 0", lambda rho: rho >= 0)
        _check_numbers(
            "learning_rate", self.learning_rate, "above 0", lambda r: r > 0
        )
        _check_numbers(
            "batch_size",
            self.batch_size,
            "whole and at least 1",
            lambda size: size >= 1 and size == int(size),
        )
        for name, known in (
            ("normalization", NORMALIZATIONS),
            ("architecture", tuple(ARCHITECTURES)),
            ("head", HEADS),
        ):
            unknown = [v for v in getattr(self, name) if v not in known]
            if unknown:
                raise ValueError(
                    f"Search space: {name} must be among {known}. "
                    f"Received: {unknown}"
                )

    @classmethod
    def read(cls, path: str | os.PathLike) -> SearchSpace:
        """The space that a small YAML or JSON file describes.

        The keys are those of this class; what is left out keeps its default.
        """
        path = pathlib.Path(path)
        try:
            # Every JSON text is YAML too, but its parser has better errors.
            read = json.loads if path.suffix == ".json" else yaml.safe_load
            found = read(path.read_text(encoding="utf-8"))
        except (
            OSError,
            ValueError,
            TypeError,
            RecursionError,
            yaml.YAMLError,
        ) as error:
            raise ValueError(
                f"{path} is no search space in YAML or JSON: {error}"
            ) from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or set(found) - known:
            raise ValueError(
                f"{path}: a search space has the keys {sorted(known)}. "
                f"Received: {reprlib.repr(found)}"
            )
        values: dict[str, Any] = {
            key: value
            if key == "scaled"
            else tuple(value)
            if isinstance(value, list)
            else (value,)
            for key, value in found.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The space, ready for JSON."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    def hyperparameters(self) -> keras_tuner.HyperParameters:
        """The space as keras-tuner knows it."""
        hp = keras_tuner.HyperParameters()
        hp.Choice("defense", list(self.defense), default=self.defense[0])
        robust = [name for name in self.defense if name != "nominal"]
        if robust:
            with hp.conditional_scope("defense", robust):
                hp.Choice("rho", [float(rho) for rho in self.rho])
        hp.Choice("learning_rate", [float(r) for r in self.learning_rate])
        hp.Choice("batch_size", [int(size) for size in self.batch_size])
        hp.Choice("normalization", list(self.normalization))
        hp.Choice("architecture", list(self.architecture))
        hp.Choice("head", list(self.head))
        return hp

    def radius(self, number: float, norm: int | str, shape) -> float:
        """The radius that a number of `rho` means."""
        return paper_radius(number, norm, shape) if self.scaled else number


def _check_numbers(name, values, wanted, fits) -> None:
    for value in values:
        try:
            # YAML takes 1e-3, without a point, for a word.
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            raise ValueError(
                f"Search space: {name} must hold numbers, {wanted}. "
                f"Received: {value!r}"
            )


def split_defense(name: str) -> tuple[str, int | str]:
    """The defence and the norm of a name such as `"arub-1"`."""
    defense, _, norm = str(name).partition("-")
    if defense not in DEFENSES or (norm and defense in ("rub", "nominal")):
        raise ValueError(
            f"A defence is one of {list(DEFENSES)}, with -1, -2 or -inf "
            f"behind all but rub and nominal. Received: {name!r}"
        )
    if defense in ("rub", "nominal"):
        return defense, 1
    return defense, canonical_norm(norm or "inf")
