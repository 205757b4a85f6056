"""Rows of the pages on losses during training, and on speed."""

from __future__ import annotations

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
    """Percent of the cases where the bound is above, a row a norm and radius.

    Args:
        found: of `run.losses.bounds`.
        plan: `BoundPlan`.
    """
    every = [case for cases in found.values() for case in cases]
    rows = []
    for norm in NORMS:
        theirs = paper.table("uci46", paper.ABOVE, norm)[f"aRUB-L{norm}"]
        for number in plan.radii:
            here = (norm, number)
            cases = [c for c in every if (c["norm"], c["number"]) == here]
            rows.append(
                {
                    "norm": norm,
                    "rho": number,
                    "paper": theirs.get(number),
                    "ours": _percent_above(cases, ROUNDING),
                    "ours_nearly": _percent_above(cases, NEARLY),
                    "cases": len(cases),
                }
            )
    return rows


def _percent_above(cases, slack):
    return round(100 * np.mean([is_above(case, slack) for case in cases]), 2)


def is_above(case: dict[str, Any], slack: float) -> bool:
    """Whether the bound is at most a share of `slack` below the loss."""
    return case["bound"] >= case["attacked"] * (1 - slack) - SMALLEST


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
