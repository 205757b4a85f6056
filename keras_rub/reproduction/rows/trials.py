"""Rows of the page on recipes that were tried."""

from __future__ import annotations

from typing import Any

from keras_rub.reproduction.plans import Trial


def trials(found: dict[Trial, dict[str, float]]) -> list[dict[str, Any]]:
    """One row a trial.

    Args:
        found: of `run.trials.run`.
    """
    return [
        {
            **trial(one),
            "clean": _percent(result, "clean"),
            "certified": _percent(result, "certified"),
            "samples": result["samples"],
        }
        for one, result in found.items()
    ]


def trial(one: Trial) -> dict[str, Any]:
    """What a row says of the trial itself.

    Args:
        one: `Trial`.
    """
    return {
        "dataset": one.dataset,
        "normalization": one.normalization,
        "defence": one.base.defense,
        "architecture": one.base.architecture,
        "rho": one.base.rho if one.base.defense == "rub" else 0.0,
        "trial": one.label,
    }


def _percent(result, key) -> float:
    return round(100 * result[key] / result["samples"], 2)
