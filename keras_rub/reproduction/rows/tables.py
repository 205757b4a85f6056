"""Rows of the pages on UCI sets: ranks, gains, and what a leak does."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from keras_rub.reproduction import choose
from keras_rub.reproduction.plans import TablePlan

Networks = dict[str, list[dict[str, Any]]]

NORMS = (2, "inf", 1)

# Standard errors on each side of a mean, for an interval of 95 %.
_HALF = 1.96

# What the paper compares with PGD-Linf: the defence, the attack, its sizes.
GAINS = (
    ("RUB", "pgd-2", (0.01, 1.0, 10.0)),
    ("aRUB-Linf", "pgd-inf", (0.001, 0.1, 1.0)),
)
RIVAL = "PGD-Linf"

# The comparison with and without the label among the features.
_LEAK_DEFENCES = ("RUB", "aRUB-Linf", "PGD-Linf", "Nominal")
_LEAK_NUMBERS = (0.1, 0.3, 1.0)
_LEAK_ATTACK = "pgd-inf"


def _accuracy(networks, defence, key, place) -> float:
    """Percent on test samples of the network that validation chooses."""
    some = [n for n in networks if n["defence"] == defence]
    found = choose.table_network(some, key, place)["test"][key]
    return 100 * (found if place is None else found[place])


def ranks(found: Networks, plan: TablePlan) -> list[dict[str, Any]]:
    """Mean rank and accuracy, one row an attack, number and defence."""
    rows = []
    for kind in plan.attacks:
        for norm in NORMS:
            places: list[tuple[str, int | None, float]] = [("clean", None, 0.0)]
            places += [
                (f"{kind}-{norm}", place, number)
                for place, number in enumerate(plan.numbers)
            ]
            for key, place, number in places:
                here = {"attack": kind, "norm": norm, "number": number}
                rows += [
                    {**here, **row, "sets": len(found)}
                    for row in _ranked(found, plan.defences, key, place)
                ]
    return rows


def _ranked(found, defences, key, place):
    """The defences under one attack, over all sets."""
    accuracy = np.array(
        [
            [_accuracy(networks, d, key, place) for d in defences]
            for networks in found.values()
        ]
    )
    places = stats.rankdata(-accuracy, axis=1)
    half = _HALF * places.std(axis=0, ddof=min(1, len(places) - 1))
    half /= np.sqrt(len(places))
    for column, defence in enumerate(defences):
        yield {
            "defence": defence,
            "mean_rank": round(places[:, column].mean(), 3),
            "half_interval": round(half[column], 3),
            "mean_accuracy": round(accuracy[:, column].mean(), 2),
        }


def gains(found: Networks, plan: TablePlan) -> list[dict[str, Any]]:
    """Gains over PGD-Linf, one row a comparison of `GAINS` and data set."""
    return [
        _gain(name, networks, defence, key, number, plan)
        for defence, key, numbers in GAINS
        # The smallest budget knows fewer numbers.
        for number in numbers
        if number in plan.numbers
        for name, networks in found.items()
    ]


def _gain(name, networks, defence, key, number, plan):
    place = plan.numbers.index(number)
    ours, theirs = (
        _accuracy(networks, title, key, place) for title in (defence, RIVAL)
    )
    return {
        "defence": defence,
        "attack": key,
        "number": number,
        "set": name.removeprefix("uci/"),
        "accuracy": round(ours, 2),
        "accuracy_pgd_linf": round(theirs, 2),
        "gain": round(ours - theirs, 2),
    }


def leaks(
    found: Networks, leaked: Networks, plan: TablePlan
) -> list[dict[str, Any]]:
    """Accuracies without and with the label, one row a set and defence.

    Returns:
        Rows with `set`, `defence` and `cells`: from a number, 0 for no
        attack, to both percents.
    """
    columns: dict[float, tuple[str, int | None]] = {0.0: ("clean", None)}
    for place, number in enumerate(plan.numbers):
        if number in _LEAK_NUMBERS:
            columns[number] = (_LEAK_ATTACK, place)
    return [
        {
            "set": name.removeprefix("uci/"),
            "defence": defence,
            "cells": {
                number: tuple(
                    _accuracy(some, defence, *where)
                    for some in (found[name], networks)
                )
                for number, where in columns.items()
            },
        }
        for name, networks in leaked.items()
        if name in found
        for defence in _LEAK_DEFENCES
    ]
