"""Rows of the summary, made of the CSV files of the other pages."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

from keras_rub.reproduction.rows.images import best_of
from keras_rub.reproduction.rows.protocol import CEILING, is_beyond

# From the names of tables to those of data sets.
_SETS = {"fashion": "fashion_mnist", "mnist": "mnist", "cifar": "cifar10"}


def summary(results: pathlib.Path) -> list[dict[str, Any]]:
    """Ours beside the paper's, one row a table and radius.

    Args:
        results: folder of the pages; those that are missing are left out.
    """
    ceilings = _ceilings(results)
    return [
        row
        for name, dataset in _SETS.items()
        for row in (
            *_certified(results, f"tab_bounds_{name}"),
            *_attacked(results, f"tab_{name}", dataset, ceilings),
            *_attacked(results, f"tab_cnn_{name}", dataset, ceilings),
        )
    ]


def _ceilings(results) -> dict[tuple[str, str, float], float]:
    """What no classifier can exceed, by data set, norm and radius."""
    return {
        (row["dataset"], row["norm"], float(row["rho"])): max(
            float(value)
            for key, value in row.items()
            if key.startswith("ceiling_")
        )
        for row in read_rows(results / "large_radii.csv")
        if row["kind"] == CEILING
    }


def _certified(results, table):
    return [
        _row(
            f"{table}, {row['normalization']}",
            row["rho"],
            float(row["paper_rub"]),
            best_of(row),
        )
        for row in read_rows(results / f"{table}.csv")
    ]


def _attacked(results, table, dataset, ceilings):
    cells: dict = {}
    for row in read_rows(results / f"{table}.csv"):
        ours, theirs = cells.setdefault((row["norm"], row["rho"]), ([], []))
        ours.append(float(row["ours"]))
        if row["paper"]:
            theirs.append(float(row["paper"]))
    return [
        _row(
            f"{table}, L{norm}",
            rho,
            max(theirs),
            max(ours),
            ceilings.get((dataset, norm, float(rho))),
        )
        for (norm, rho), (ours, theirs) in cells.items()
        if theirs
    ]


def _row(table, rho, theirs, ours, ceiling=None):
    return {
        "table": table,
        "rho": float(rho),
        "paper": theirs,
        "ours": ours,
        "gain": round(ours - theirs, 2),
        "ceiling": ceiling,
        "beyond": is_beyond(theirs, ceiling),
    }


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a page's CSV file; none if the page does not exist."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
