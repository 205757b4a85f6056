"""Rows of the pages on images: attacked and certified accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from keras_rub.reproduction import paper
from keras_rub.reproduction.choose import Cells
from keras_rub.reproduction.plans import MASKED, ImagePlan
from keras_rub.reproduction.run.images import Proofs, accuracy
from keras_rub.reproduction.run.networks import Network

_NORMS = (2, 1, "inf")


def paper_tables(dataset: str, cnn: bool) -> dict[Any, dict[str, dict]]:
    """The paper's attacked accuracies, from the norm: as of `paper.table`."""
    if cnn:
        return {2: paper.table(dataset, paper.ATTACKED_CNN, 2, "cnn")}
    return {norm: paper.table(dataset, paper.ATTACKED, norm) for norm in _NORMS}


def attacked_radii(
    plan: ImagePlan, dataset: str, cnn: bool
) -> dict[Any, list[float]]:
    """The radii of a table of attacks, from the norm, without 0."""
    theirs = paper_tables(dataset, cnn)
    if plan.smoke_radii:
        return {norm: plan.smoke_radii[norm] for norm in theirs}
    return {
        norm: sorted({rho for row in table.values() for rho in row if rho})
        for norm, table in theirs.items()
    }


def attacked(
    cells: Cells,
    results: dict[Network, dict[str, Any]],
    theirs: dict[Any, dict[str, dict]],
    attack: str,
) -> list[dict[str, Any]]:
    """Attacked accuracies, one row a norm, defence and radius.

    Args:
        cells: of `choose.attacked_cells`.
        results: of `run.images.attack` on test samples.
        theirs: of `paper_tables`.
        attack: which accuracy stands for the paper's attack.
    """
    return [
        {
            "norm": norm,
            "defence": defence,
            "rho": rho,
            "paper": theirs[norm].get(defence, {}).get(rho),
            "ours": accuracy(result, norm, rho, attack),
            "ours_strong": accuracy(result, norm, rho, "worst"),
            "samples": result["samples"],
            "normalization": network.normalization,
            "training_rho": network.recipe.rho,
            "seed": network.recipe.seed,
        }
        for (norm, defence, rho), network in cells.items()
        if (result := results.get(network))
    ]


def leaders(cells: Cells, rows: list[dict[str, Any]]) -> Cells:
    """The cells of the defence that is best at a norm and radius.

    Args:
        cells: of `choose.attacked_cells`.
        rows: of `attacked`.
    """
    best: dict[tuple[Any, float], dict[str, Any]] = {}
    for row in rows:
        place = row["norm"], row["rho"]
        if row["defence"] != MASKED and (
            place not in best or row["ours"] > best[place]["ours"]
        ):
            best[place] = row
    first = [(norm, row["defence"], rho) for (norm, rho), row in best.items()]
    return {cell: cells[cell] for cell in first}


def certified_radii(plan: ImagePlan, dataset: str) -> list[float]:
    """The radii of a certified table, 0 among them."""
    if plan.smoke_radii:
        return [0.0, *plan.smoke_radii[1]]
    return sorted(paper.table(dataset, paper.CERTIFIED, 1)["RUB"])


def certified(
    network: Network,
    rho: float,
    proofs: Proofs,
    theirs: dict[str, dict[float, float]],
) -> dict[str, Any]:
    """The row of one network and radius in a certified table.

    Args:
        network: the network.
        rho: the radius.
        proofs: of `run.images.certify`.
        theirs: the paper's table, as of `paper.table`.
    """

    def percent(places):
        if places is None:
            return None
        return round(100 * len(places) / proofs.samples, 2)

    return {
        "normalization": network.normalization,
        "architecture": network.recipe.architecture,
        "seed": network.recipe.seed,
        "rho": rho,
        "ours_rub": percent(proofs.rub),
        "ours_auto": percent(proofs.auto),
        "ours_auto_range": percent(proofs.auto_range),
        "ours_first": _first(proofs),
        "training_rho": network.recipe.rho,
        "clean": percent(proofs.right),
        "samples": proofs.samples,
        "paper_rub": theirs["RUB"][rho],
        "paper_best": max(line[rho] for line in theirs.values()),
    }


def _first(proofs):
    """Percent of the best bound over as many images as the paper's."""
    if proofs.samples <= paper.SAMPLES:
        return None
    bounds = (proofs.auto_range, proofs.auto, proofs.rub)
    best = next(places for places in bounds if places is not None)
    some = sum(place < paper.SAMPLES for place in best)
    return round(100 * some / paper.SAMPLES, 2)


def best_of(row: dict[str, Any]) -> float:
    """Our best proved percent in a row of a certified table."""
    keys = ("ours_rub", "ours_auto", "ours_auto_range")
    return max(float(row[key]) for key in keys if row[key] not in (None, ""))


@dataclasses.dataclass(frozen=True)
class Erasure:
    """From where on an attacker can turn all test images into the same one.

    Attributes:
        radii: from the norm to the smallest such radius, if there is one.
        most: share of the most frequent class.
    """

    radii: dict[Any, float]
    most: float


def erasure(
    inputs: Iterable[dict[str, Any]], radii: dict[Any, list[float]]
) -> Erasure:
    """The radii at which no network can do better than a constant.

    Args:
        inputs: what is known of each kind, as of `run.images.inputs`.
        radii: from the norm to the radii of the table.
    """
    inputs = list(inputs)
    found = {}
    for norm, values in radii.items():
        reach = max(facts["reach"][str(norm)] for facts in inputs)
        beyond = [rho for rho in values if rho >= 0.9999 * reach]
        if beyond:
            found[norm] = min(beyond)
    return Erasure(found, inputs[0]["most"])


def units(
    inputs: dict[tuple[str, str], dict[str, Any]], networks: Iterable[Network]
) -> list[str]:
    """What a radius is, for each kind of inputs that networks take.

    Args:
        inputs: as of `run.images.inputs`.
        networks: the networks.
    """
    kinds = dict.fromkeys((n.dataset, n.normalization) for n in networks)
    return [
        f"{name}, {normalization}: {inputs[name, normalization]['units']}."
        for name, normalization in kinds
    ]
