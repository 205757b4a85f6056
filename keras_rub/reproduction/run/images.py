"""Image networks under attack, and certified."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

import keras_rub
from keras_rub import PerturbationSet
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import ImagePlan
from keras_rub.reproduction.run.networks import Network


def attack(
    context: Context,
    plan: ImagePlan,
    radii: dict[Network, dict[Any, list[float]]],
    part: str,
) -> dict[Network, dict[str, Any]]:
    """Attacks networks, one a job.

    Validation samples see the paper's attacks, test samples those of the plan.

    Args:
        context: `Context`.
        plan: `ImagePlan`.
        radii: from the network to the radii of each norm.
        part: `"validation"` or `"test"`.

    Returns:
        The results that are there: `rows` as of `keras_rub.Evaluation`.
    """
    return context.do(
        {
            network: _attack_job(context, plan, network, places, part)
            for network, places in radii.items()
        }
    )


def _attack_job(context, plan, network, radii, part) -> Job:
    cell = plan.attack_of(network.recipe.architecture == "cnn")
    if part == "validation":
        attacks, count = "paper", cell.validation
    else:
        attacks, count = cell.attacks, cell.samples

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        keras.utils.set_random_seed(0)
        result = keras_rub.evaluate(
            model,
            *(array[:count] for array in getattr(data, part)),
            radii=radii,
            norms=list(radii),
            attacks=attacks,
            certificates=False,
            perturbations=PerturbationSet(),
            examples=0,
            diagnosis=False,
            verbose=0,
        )
        return {"samples": len(result), "rows": result.rows}

    settings = {
        "network": network.recipe.to_dict(),
        "radii": {str(norm): list(values) for norm, values in radii.items()},
        "samples": count,
        "attacks": attacks,
    }
    return Job(f"attack-{part}-{network.name}", settings, work)


def accuracy(
    result: dict[str, Any], norm: int | str, rho: float, attack: str
) -> float:
    """A percent; without an attack it is the same in all rows.

    Args:
        result: of `attack`.
        norm: the norm.
        rho: the radius.
        attack: a column of the rows, such as `"foolbox-pgd"` or `"worst"`.
    """
    rows = result["rows"]
    if rho:
        here = (str(norm), rho)
        rows = [row for row in rows if (row["norm"], row["rho"]) == here]
    return round(100 * rows[0][attack if rho else "clean"], 2)


@dataclasses.dataclass(frozen=True)
class Proofs:
    """What is proved of one network at one radius.

    Attributes:
        samples: number of test samples.
        right: places of those that are classified right.
        rub: places of those that the paper's bound certifies.
        auto: the same with `"auto"`, or `None` if it is not run or not done.
        auto_range: the same for an attacker who keeps to the valid range.
    """

    samples: int
    right: list[int]
    rub: list[int]
    auto: list[int] | None = None
    auto_range: list[int] | None = None


def certify(
    context: Context, plan: ImagePlan, network: Network, rho: float
) -> Proofs | None:
    """Certifies test samples at one radius; `None` if that is left to do.

    The paper's bound comes first; `"auto"` gets what it leaves open, and, with
    a valid range, what that leaves open.
    """
    job = _certify_job(context, plan, network, rho)
    result = context.do({rho: job}).get(rho)
    if result is None:
        return None
    right = result["right"]
    # Without a perturbation the accuracy itself.
    rub = result["certified"] if rho else right
    auto = _prove(context, plan, network, rho, right, rub)
    auto_range = None
    if auto is not None and network.normalization == "unit":
        auto_range = _prove(
            context, plan, network, rho, right, auto, in_range=True
        )
    return Proofs(result["samples"], right, rub, auto, auto_range)


def _certify_job(context, plan, network, rho) -> Job:
    """Certifies with the paper's bound."""

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        x, y = (array[: plan.certified] for array in data.test)
        result = keras_rub.certify(
            model,
            x,
            y,
            rho=rho,
            method="rub",
            perturbations=PerturbationSet(1),
            decide_only=True,
            verbose=0,
        )
        return {
            "samples": len(x),
            "right": np.flatnonzero(result.predicted == y).tolist(),
            "certified": np.flatnonzero(result.certified).tolist(),
        }

    settings = {
        "network": network.recipe.to_dict(),
        "rho": rho,
        "samples": plan.certified,
    }
    return Job(f"certify-rub-{network.name}-at-{rho:g}", settings, work)


def _prove(context, plan, network, rho, right, proved, in_range=False):
    """Places of all certified samples; `None` if jobs are left."""
    open_ = sorted(set(right) - set(proved))
    if plan.most_open is not None and len(open_) > plan.most_open:
        return None
    if not rho or not open_:
        return proved
    parts = [
        open_[first : first + plan.chunk]
        for first in range(0, len(open_), plan.chunk)
    ]
    found = context.do(
        {
            number: _auto_job(context, network, rho, number, part, in_range)
            for number, part in enumerate(parts)
        }
    )
    if len(found) < len(parts):
        return None
    return proved + [
        place for result in found.values() for place in result["certified"]
    ]


def _auto_job(context, network, rho, number, places, in_range) -> Job:
    """Certifies some samples with `"auto"`."""

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        x, y = (part[places] for part in data.test)
        result = keras_rub.certify(
            model,
            x,
            y,
            rho=rho,
            method="auto",
            perturbations=PerturbationSet(
                1, input_range=data.input_range if in_range else None
            ),
            decide_only=True,
            verbose=0,
        )
        return {"certified": np.asarray(places)[result.certified].tolist()}

    kind = "range" if in_range else "auto"
    settings = {
        "network": network.recipe.to_dict(),
        "rho": rho,
        "open": places,
        "in_range": in_range,
    }
    return Job(
        f"certify-{kind}-{network.name}-at-{rho:g}-{number}", settings, work
    )
