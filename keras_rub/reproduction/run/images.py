"""Image networks under attack, and certified."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

import keras_rub
from keras_rub import PerturbationSet
from keras_rub.reproduction.compact import pack, to_columns, to_rows, unpack
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import ImagePlan
from keras_rub.reproduction.run.networks import Network

# A network and a radius to certify it at.
Case = tuple[Network, float]


def inputs(
    context: Context, networks: Iterable[Network]
) -> dict[tuple[str, str], dict[str, Any]]:
    """What pages tell of the inputs of networks; a job a kind of inputs.

    Returns:
        From the data set and the normalisation to a dict: the `units` of a
        radius, the largest norms `reach` of a test image, and `most`, the
        share of the most frequent class. Empty unless all are there.
    """
    kinds = dict.fromkeys((n.dataset, n.normalization) for n in networks)
    found = context.do({kind: _inputs_job(context, *kind) for kind in kinds})
    return found if len(found) == len(kinds) else {}


def _inputs_job(context, name, normalization) -> Job:
    def work():
        data = context.load(name, normalization)
        x, y = data.test
        flat = x.reshape(len(x), -1)
        return {
            "units": data.units,
            "reach": {
                str(norm): float(
                    np.linalg.norm(flat, float(norm), axis=1).max()
                )
                for norm in (1, 2, "inf")
            },
            "most": float(np.bincount(y).max() / len(y)),
        }

    settings = {"dataset": name, "normalization": normalization}
    return Job(f"inputs-{name}-{normalization}", settings, work)


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
    found = context.do(
        {
            network: _attack_job(context, plan, network, places, part)
            for network, places in radii.items()
        }
    )
    return {
        network: {**result, "rows": to_rows(result["rows"])}
        for network, result in found.items()
    }


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
        return {"samples": len(result), "rows": to_columns(result.rows)}

    settings = {
        "network": network.recipe,
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
    context: Context, plan: ImagePlan, cases: list[Case]
) -> dict[Case, Proofs]:
    """Certifies test samples; what is left to do is left out.

    The paper's bound comes first; `"auto"` gets what it leaves open, and, with
    a valid range, what that leaves open.

    Args:
        context: `Context`.
        plan: `ImagePlan`.
        cases: pairs of a network and a radius.
    """
    results = context.do(
        {case: _certify_job(context, plan, *case) for case in cases}
    )
    right = {case: unpack(found["right"]) for case, found in results.items()}
    rub = {
        # Without a perturbation the accuracy itself.
        (network, rho): unpack(found["certified"])
        if rho
        else right[network, rho]
        for (network, rho), found in results.items()
    }
    auto = _prove(context, plan, right, rub)
    in_range = _prove(
        context,
        plan,
        right,
        {case: auto[case] for case in auto if case[0].normalization == "unit"},
        in_range=True,
    )
    return {
        case: Proofs(
            found["samples"],
            right[case],
            rub[case],
            auto.get(case),
            in_range.get(case),
        )
        for case, found in results.items()
    }


def _certify_job(context, plan, network, rho) -> Job:
    """Certifies with the paper's bound."""
    samples = plan.to_certify(network.recipe)

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        x, y = (array[:samples] for array in data.test)
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
            "right": pack(np.flatnonzero(result.predicted == y)),
            "certified": pack(np.flatnonzero(result.certified)),
        }

    settings = {
        "network": network.recipe,
        "rho": rho,
        "samples": samples,
    }
    return Job(f"certify-rub-{network.name}-at-{rho:g}", settings, work)


def _prove(context, plan, right, proved, in_range=False):
    """Places of all certified samples, by case; not of those with jobs left.

    Args:
        context: `Context`.
        plan: `ImagePlan`.
        right: from the case to the places that are classified right.
        proved: from the case to the places that are certified so far.
        in_range: whether the attacker keeps to the valid range.
    """
    parts = {}
    for case, places in proved.items():
        open_ = sorted(set(right[case]) - set(places)) if case[1] else []
        if plan.most_open is None or len(open_) <= plan.most_open:
            parts[case] = [
                open_[first : first + plan.chunk]
                for first in range(0, len(open_), plan.chunk)
            ]
    found = context.do(
        {
            (case, number): _auto_job(context, case, number, part, in_range)
            for case, several in parts.items()
            for number, part in enumerate(several)
        }
    )
    return {
        case: proved[case]
        + [
            part[place]
            for number, part in enumerate(several)
            for place in unpack(found[case, number]["certified"])
        ]
        for case, several in parts.items()
        if all((case, number) in found for number in range(len(several)))
    }


def _auto_job(context, case, number, places, in_range) -> Job:
    """Certifies some samples with `"auto"`."""
    network, rho = case

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
        # Places among those that were open, which are far fewer.
        return {"certified": pack(np.flatnonzero(result.certified))}

    kind = "range" if in_range else "auto"
    settings = {
        "network": network.recipe,
        "rho": rho,
        "open": pack(places),
        "in_range": in_range,
    }
    return Job(
        f"certify-{kind}-{network.name}-at-{rho:g}-{number}", settings, work
    )
