"""Rows of the page on large radii."""

from __future__ import annotations

import math
from typing import Any

from keras_rub.reproduction import paper
from keras_rub.reproduction.choose import SearchedCells
from keras_rub.reproduction.plans import ProtocolPlan
from keras_rub.reproduction.run.images import accuracy
from keras_rub.reproduction.run.networks import Network
from keras_rub.reproduction.run.protocol import Candidate, Radii

# What a row tells of.
CEILING, START, SEARCH, FULL, ROUNDED, SCALED, NOISE, TRAINED = (
    "ceiling", "start", "search", "full", "rounded", "scaled", "noise",
    "trained",
)  # fmt: skip

# The paper's images are others, so that shares of them differ by this much
# where nothing else does: two deviations of a share of 2000 or more.
SAMPLING = 2.0  # percentage points

# From here on the noise of a random start moves pixels visibly.
_NOTICEABLE = 0.15


def is_beyond(percent: float | None, ceiling: float | None) -> bool:
    """Whether no classifier can have this accuracy."""
    if percent is None or ceiling is None:
        return False
    return percent > ceiling + SAMPLING


def ceiling_radii(plan: ProtocolPlan, dataset: str) -> Radii:
    """The radii of the paper's attacked tables, else those of the plan."""
    found: Radii = {}
    for norm, *kind in (
        (2, paper.ATTACKED),
        (2, paper.ATTACKED_CNN, "cnn"),
        (1, paper.ATTACKED),
        ("inf", paper.ATTACKED),
    ):
        table = paper.table(dataset, kind[0], norm, *kind[1:])
        radii = {rho for row in table.values() for rho in row if rho}
        if radii:
            found[norm] = sorted(radii.union(found.get(norm, ())))
    return found or {norm: list(radii) for norm, radii in plan.radii.items()}


def ceilings(
    dataset: str, radii: Radii, found: dict[str, dict[str, list[float]]]
) -> list[dict[str, Any]]:
    """The paper's best figure beside what no classifier can exceed.

    Args:
        dataset: name of the data set.
        radii: of `ceiling_radii`.
        found: of `run.protocol.ceilings`.
    """

    def percent(part, norm, place):
        return round(100 * part[str(norm)][place], 2)

    return [
        {
            "dataset": dataset,
            "kind": CEILING,
            "norm": str(norm),
            "rho": rho,
            "paper": _best(dataset, norm, rho),
            **{
                f"ceiling_{name}": percent(part, norm, place)
                for name, part in found.items()
            },
        }
        for norm, values in radii.items()
        for place, rho in enumerate(values)
        if found
    ]


def start_noise(norm: int | str, rho: float, features: int) -> float:
    """How far foolbox's PGD moves a feature before its first step.

    It begins at a random point of the ball, all points alike. This is the
    standard deviation of a feature there.

    Args:
        norm: 1, 2 or `"inf"`.
        rho: the radius.
        features: their number.
    """
    if norm == "inf":
        return rho / math.sqrt(3)
    if norm == 2:
        return rho / math.sqrt(features + 2)
    return rho * math.sqrt(2 / ((features + 1) * (features + 2)))


def starts(dataset: str, features: int) -> list[dict[str, Any]]:
    """The paper's attacked figures beside the noise that its PGD begins with.

    Args:
        dataset: name of the data set.
        features: of one image.
    """
    return [
        {
            "dataset": dataset,
            "kind": START,
            "norm": str(norm),
            "rho": rho,
            "defence": title,
            "paper": percent,
            "start_noise": round(start_noise(norm, rho, features), 4),
        }
        for norm in (1, 2, "inf")
        for title, line in paper.table(dataset, paper.ATTACKED, norm).items()
        for rho, percent in line.items()
        if rho
    ]


def noticeable(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The cells of each defence where a random start is noticeable.

    Args:
        rows: of `starts`, of one data set.

    Returns:
        From the defence to its rows, by growing noise.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["start_noise"]):
        some = found.setdefault(row["defence"], [])
        if row["start_noise"] >= _NOTICEABLE:
            some.append(row)
    # In the order of the paper.
    return {row["defence"]: found[row["defence"]] for row in rows}


def untouched(
    rows: list[dict[str, Any]], ceilings: list[dict[str, Any]]
) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Rows of the paper that are as high where nobody can be as elsewhere.

    Args:
        rows: of `starts`, of one data set.
        ceilings: of `ceilings`, of the same.

    Returns:
        From the defence to two things: its cell with the least noise of those
        that are beyond any classifier, and its cells with less noise, of any
        norm, whose figures are the same within `SAMPLING`.
    """
    limits = {
        (row["norm"], row["rho"]): max(
            value
            for key, value in row.items()
            if key.startswith("ceiling_") and value is not None
        )
        for row in ceilings
    }
    found = {}
    for title, some in noticeable(rows).items():
        beyond = [
            row
            for row in some
            if is_beyond(row["paper"], limits.get((row["norm"], row["rho"])))
        ]
        if not beyond:
            continue
        first = {**beyond[0]}
        first["ceiling"] = limits[first["norm"], first["rho"]]
        alike = [
            row
            for row in some
            if row["start_noise"] < first["start_noise"]
            and abs(row["paper"] - first["paper"]) <= SAMPLING
        ]
        if alike:
            found[title] = first, alike
    return found


def search(
    dataset: str,
    validation: dict[Candidate, dict[str, Any]],
    cells: SearchedCells,
    results: dict[Candidate, dict[str, Any]],
) -> list[dict[str, Any]]:
    """What the paper's search comes to, one row a norm and radius.

    Args:
        dataset: name of the data set.
        validation: of `run.protocol.search`.
        cells: of `choose.searched_cells`.
        results: of `run.protocol.judge`.
    """
    return [
        {
            "dataset": dataset,
            "kind": SEARCH,
            "norm": str(norm),
            "rho": rho,
            "paper": _best(dataset, norm, rho),
            **_judged(results[candidate], norm, rho),
            "defence": candidate.title,
            "normalization": candidate.normalization,
            "number": candidate.number,
            "rate": candidate.rate,
            "steps": candidate.steps,
            "batch_size": candidate.batch_size,
            "seed": candidate.seed,
            "networks": len(validation),
        }
        for (norm, rho), candidate in cells.items()
        if candidate in results
    ]


def full_length(
    dataset: str,
    plan: ProtocolPlan,
    validation: dict[Candidate, dict[str, Any]],
) -> list[dict[str, Any]]:
    """The networks that are trained longest, as long as the paper's.

    Args:
        dataset: name of the data set.
        plan: `ProtocolPlan`.
        validation: of `run.protocol.search`.

    Returns:
        One row a defence, batch size and seed, norm and radius: the best
        network over inputs, numbers and rates.
    """
    groups: dict[tuple[Any, ...], list[Candidate]] = {}
    longest = max((candidate.steps for candidate in validation), default=0)
    for candidate in validation:
        if candidate.steps == longest:
            key = (candidate.title, candidate.batch_size, candidate.seed)
            groups.setdefault(key, []).append(candidate)
    found = []
    for (title, batch_size, seed), some in groups.items():
        for norm, radii in plan.radii.items():
            theirs = paper.table(dataset, paper.ATTACKED, norm)
            for place, rho in enumerate(radii):
                best = max(some, key=lambda c: validation[c][str(norm)][place])
                accuracy = validation[best][str(norm)][place]
                found.append(
                    {
                        "dataset": dataset,
                        "kind": FULL,
                        "norm": str(norm),
                        "rho": rho,
                        "paper": theirs.get(title, {}).get(rho),
                        "ours": round(100 * accuracy, 2),
                        "defence": title,
                        "normalization": best.normalization,
                        "number": best.number,
                        "rate": best.rate,
                        "steps": longest,
                        "batch_size": batch_size,
                        "seed": seed,
                    }
                )
    return found


def rounded(
    dataset: str,
    plan: ProtocolPlan,
    found: dict[Candidate, dict[str, Any]],
) -> list[dict[str, Any]]:
    """PGD by two losses that differ in rounding only.

    Args:
        dataset: name of the data set.
        plan: `ProtocolPlan`.
        found: of `run.protocol.round_off`.
    """
    return [
        {
            "dataset": dataset,
            "kind": ROUNDED,
            "norm": str(norm),
            "rho": rho,
            "defence": candidate.title,
            "seed": candidate.seed,
            "clean": round(100 * result["clean"], 2),
            "certain": round(100 * result["certain"], 2),
            "ours": round(100 * result["cross_entropy"][str(norm)][place], 2),
            "ours_log_odds": round(
                100 * result["log_odds"][str(norm)][place], 2
            ),
        }
        for candidate, result in found.items()
        for norm, radii in plan.radii.items()
        for place, rho in enumerate(radii)
    ]


def scaled(
    dataset: str,
    plan: ProtocolPlan,
    found: dict[tuple[str, float], dict[str, Any]],
) -> list[dict[str, Any]]:
    """One classifier with its logits multiplied, and under noise.

    Args:
        dataset: name of the data set.
        plan: `ProtocolPlan`.
        found: of `run.protocol.scale`.
    """
    rows = []
    for (title, factor), result in found.items():
        for norm, radii in plan.radii.items():
            for place, rho in enumerate(radii):
                here = {
                    "dataset": dataset,
                    "norm": str(norm),
                    "rho": rho,
                    "defence": title,
                }
                rows.append(
                    {
                        **here,
                        "kind": SCALED,
                        "factor": factor,
                        **_judged(result, norm, rho),
                    }
                )
                noise = result["noise"].get(str(norm))
                if noise is not None and factor == plan.factors[0]:
                    rows.append(
                        {
                            **here,
                            "kind": NOISE,
                            "ours": round(100 * noise[place], 2),
                        }
                    )
    return rows


def trained(
    dataset: str,
    cells: dict[tuple[Any, float, int], Network],
    found: dict[Network, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Networks that were trained for these radii.

    Args:
        dataset: name of the data set.
        cells: of `choose.strongest_cells`.
        found: of `run.protocol.test`.
    """
    return [
        {
            "dataset": dataset,
            "kind": TRAINED,
            "norm": str(norm),
            "rho": rho,
            "paper": _best(dataset, norm, rho),
            **_judged(found[network], norm, rho),
            "defence": network.title,
            "number": network.recipe.rho,
            "seed": seed,
        }
        for (norm, rho, seed), network in cells.items()
        if network in found
    ]


def _best(dataset, norm, rho) -> float | None:
    """The paper's best figure of any defence."""
    theirs = paper.table(dataset, paper.ATTACKED, norm)
    best = [line[rho] for line in theirs.values() if rho in line]
    return max(best, default=None)


def _judged(result, norm, rho) -> dict[str, Any]:
    return {
        "clean": accuracy(result, norm, 0.0, "clean"),
        "ours": accuracy(result, norm, rho, "paper"),
        "ours_strong": accuracy(result, norm, rho, "worst"),
        "zero_gradient": round(100 * result["zero_gradient"], 2),
    }
