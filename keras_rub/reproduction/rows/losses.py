"""Rows of the pages on losses during training, and on speed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from keras_rub.reproduction import paper
from keras_rub.reproduction.plans import (
    IMAGE_DEFENCES,
    TABLE_DEFENCES,
    BoundPlan,
    SpeedPlan,
)

NORMS = ("inf", "1")

# How far below the attacked loss a bound may be and counts as above.
ROUNDING = 1e-5  # of the loss
SMALLEST = 1e-7  # below, a mean of float32 losses is rounding
NEARLY = 0.01  # of the loss, for the second count

# From the name of a share to the bound and the loss of a case it compares. Each
# differs from the one before in one thing: the first is the authors' protocol.
SHARES = {
    "theirs": ("paper_bound", "foolbox"),
    "same_radius": ("bound", "foolbox"),
    "ours": ("bound", "attacked"),
    "ours_train": ("train_bound", "train_attacked"),
}

# Which networks a row is of, besides those of one rate or training radius.
ALL = "all"
OWN = "own radius"


def curves(found: dict[tuple[str, float], dict]) -> list[dict[str, Any]]:
    """Losses over training, one row a network and moment.

    Args:
        found: of `run.losses.curves`.
    """
    return [
        {
            "defence": title,
            "rho": rho,
            "step": step,
            **{
                key: round(curve[key][index], 5)
                for key in ("minimised", "attacked", "clean")
            },
        }
        for (title, rho), curve in found.items()
        for index, step in enumerate(curve["step"])
    ]


def above(found: dict[str, list[dict]], plan: BoundPlan) -> list[dict]:
    """Percents of the cases where the bound is above.

    Args:
        found: of `run.losses.bounds`.
        plan: `BoundPlan`.

    Returns:
        A row for each norm, radius and choice of `networks`: all of them,
        those that were trained for the radius, those of one learning rate,
        those that were trained for one radius. Each has the shares of
        `SHARES`; cases with a loss that is not a number are left out, as in
        the authors' code.
    """
    every = [case for cases in found.values() for case in cases]
    rows = []
    for norm, number in itertools.product(NORMS, plan.radii):
        here = (norm, number)
        theirs = paper.table("uci46", paper.ABOVE, norm)[f"aRUB-L{norm}"]
        cases = [c for c in every if (c["norm"], c["number"]) == here]
        for networks, some in _choices(cases, plan).items():
            if some:
                rows.append(
                    {
                        "norm": norm,
                        "rho": number,
                        "networks": networks,
                        "paper": theirs.get(number)
                        if networks == ALL
                        else None,
                        **_shares(some),
                    }
                )
    return rows


def _choices(cases, plan):
    return {
        ALL: cases,
        OWN: [case for case in cases if case["trained"] == case["number"]],
        **{
            f"rate {rate:g}": [case for case in cases if case["rate"] == rate]
            for rate in plan.rates
        },
        **{
            f"trained for {number:g}": [
                case for case in cases if case["trained"] == number
            ]
            for number in plan.training_numbers
        },
    }


def _shares(cases):
    counted = [
        case
        for case in cases
        if not any(
            np.isnan(case[key]) for pair in SHARES.values() for key in pair
        )
    ]
    return {
        **{
            name: _percent_above(
                counted, *pair, 0.0 if name == "theirs" else ROUNDING
            )
            for name, pair in SHARES.items()
        },
        "ours_nearly": _percent_above(counted, *SHARES["ours"], NEARLY),
        "cases": len(counted),
        "left_out": len(cases) - len(counted),
    }


def _percent_above(cases, bound, attacked, slack):
    if not cases:
        return None
    right = [is_above(case[bound], case[attacked], slack) for case in cases]
    return round(100 * float(np.mean(right)), 2)


def is_above(bound: float, attacked: float, slack: float) -> bool:
    """Whether a bound is at most a share of `slack` below a loss."""
    smallest = SMALLEST if slack else 0.0
    return bound >= attacked * (1 - slack) - smallest


def averages(
    rows: list[dict[str, Any]], norm: str, networks: str
) -> dict[str, float]:
    """Means of the shares over the radii above 0; empty without rows.

    Args:
        rows: of `above`.
        norm: one of `NORMS`.
        networks: which of them.
    """
    some = [
        row
        for row in rows
        if (row["norm"], row["networks"]) == (norm, networks) and row["rho"] > 0
    ]
    found = {}
    for key in ("paper", *SHARES):
        values = [row[key] for row in some if row[key] is not None]
        if values:
            found[key] = float(np.mean(values))
    return found


def speed(
    found: dict[str, dict[str, float]], plan: SpeedPlan
) -> list[dict[str, Any]]:
    """Batches a second, one row a kind of data and defence.

    Args:
        found: of `run.speed.run`.
        plan: `SpeedPlan`.
    """
    rows = []
    for title, data, names, defences in (
        ("UCI", "uci46", plan.tables, TABLE_DEFENCES),
        ("Images", "vision3", plan.images, IMAGE_DEFENCES),
    ):
        measured = [found[name] for name in names if name in found]
        rows += [
            {"data": title, **_speed(defence, measured, paper.speeds(data))}
            for defence in defences
            if defence in plan.defences and measured
        ]
    return rows


def _speed(defence, measured, theirs):
    rates = np.array([rates[defence] for rates in measured])
    slower = np.array([rates["Nominal"] / rates[defence] for rates in measured])
    rate, deviation = theirs[defence]
    return {
        "defence": defence,
        "paper_batches_per_second": rate,
        "paper_deviation": deviation,
        "paper_nominal_over_defence": round(theirs["Nominal"][0] / rate, 2),
        "ours_batches_per_second": round(rates.mean(), 2),
        "ours_deviation": round(rates.std(), 2),
        "ours_nominal_over_defence": round(slower.mean(), 2),
        "sets": len(measured),
    }
