"""Rows of the summary, made of the CSV files of the other pages."""

from __future__ import annotations

import csv
import enum
import math
import pathlib
import statistics
from typing import Any

from keras_rub.reproduction import paper
from keras_rub.reproduction.plans import MASKED
from keras_rub.reproduction.records import from_line
from keras_rub.reproduction.rows.images import best_of
from keras_rub.reproduction.rows.protocol import (
    CEILING,
    FULL,
    SAMPLING,
    SEARCH,
    START,
    TRAINED,
    is_beyond,
    untouched,
)

# From the names of tables to those of data sets.
_SETS = {"fashion": "fashion_mnist", "mnist": "mnist", "cifar": "cifar10"}


def summary(results: pathlib.Path) -> list[dict[str, Any]]:
    """Ours beside the paper's, one row a table and radius.

    Args:
        results: folder of the pages; those that are missing are left out.
    """
    known = _large_radii(results)
    return [
        row
        for name, dataset in _SETS.items()
        for row in (
            *_certified(results, f"tab_bounds_{name}"),
            *_attacked(results, f"tab_{name}", dataset, known),
            *_attacked(results, f"tab_cnn_{name}", dataset, known),
        )
    ]


def _large_radii(results) -> dict[tuple[str, str, float], dict[str, Any]]:
    """What the page on large radii knows of a data set, norm and radius.

    `ceiling` is what no classifier can exceed, `plain` what a network without
    defence has under the paper's attacks if it is trained as the paper does,
    `other` what ours have that were trained against attacks at such radii, the
    better of our recipes, over seeds, and the paper's, and `untouched` the
    defences of the paper whose figure is the same where nobody can have it.
    """
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    rows = read_rows(results / "large_radii.csv")
    for name in dict.fromkeys(row["dataset"] for row in rows):
        some = [_numbers(row) for row in rows if row["dataset"] == name]
        for title, (_, alike) in untouched(
            [row for row in some if row["kind"] == START],
            [row for row in some if row["kind"] == CEILING],
        ).items():
            for row in alike:
                place = (name, row["norm"], row["rho"])
                facts = found.setdefault(place, {})
                facts.setdefault("untouched", set()).add(title)
    others: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        place = (row["dataset"], row["norm"], float(row["rho"]))
        facts = found.setdefault(place, {})
        if row["kind"] == CEILING:
            facts["ceiling"] = max(
                float(value)
                for key, value in row.items()
                if key.startswith("ceiling_")
            )
        elif row["kind"] == FULL and row["defence"] == "Nominal":
            plain = float(row["ours"])
            facts["plain"] = max(plain, facts.get("plain", plain))
        elif row["kind"] == TRAINED:
            others.setdefault(place, []).append(float(row["ours"]))
        elif row["kind"] == SEARCH and row["defence"].startswith("PGD"):
            facts["other"] = float(row["ours"])
    for place, figures in others.items():
        mean = statistics.fmean(figures)
        found[place]["other"] = max(mean, found[place].get("other", mean))
    return found


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    """A row with its figures as numbers."""
    words = ("kind", "dataset", "norm", "defence")
    return {
        key: value if key in words else float(value)
        for key, value in row.items()
        if key in words
        or key in ("rho", "paper", "start_noise")
        or key.startswith("ceiling_")
        if value
    }


def _certified(results, table):
    """Of several seeds the mean counts."""
    cells: dict = {}
    for row in read_rows(results / f"{table}.csv"):
        kind = row["normalization"]
        if not row["architecture"].startswith("mlp"):
            kind += f", {row['architecture']}"
        cells.setdefault((kind, row["rho"]), []).append(row)
    ours = {
        cell: round(sum(map(best_of, rows)) / len(rows), 2)
        for cell, rows in cells.items()
    }
    return [
        _row(
            f"{table}, {kind}",
            rho,
            float(rows[0]["paper_rub"]),
            ours[kind, rho],
            samples=int(rows[0]["samples"]),
            other=max(ours[cell] for cell in ours if cell[1] == rho),
        )
        for (kind, rho), rows in cells.items()
    ]


def _attacked(results, table, dataset, known):
    cells: dict = {}
    for row in read_rows(results / f"{table}.csv"):
        cells.setdefault((row["norm"], row["rho"]), []).append(row)
    found = []
    for (norm, rho), rows in cells.items():
        theirs = {r["defence"]: float(r["paper"]) for r in rows if r["paper"]}
        if not theirs:
            continue
        masked = [float(r["ours"]) for r in rows if r["defence"] == MASKED]
        facts = dict(known.get((dataset, norm, float(rho)), {}))
        untouched_rows = facts.pop("untouched", ())
        if "cnn" in table:  # these facts are of perceptrons
            facts = {k: v for k, v in facts.items() if k == "ceiling"}
            untouched_rows = ()
        best = max(
            (row for row in rows if row["defence"] != MASKED and _first(row)),
            key=lambda row: float(row["ours"]),
        )
        seeds = [row for row in rows if row["defence"] == best["defence"]]
        found.append(
            _row(
                f"{table}, L{norm}",
                rho,
                max(theirs.values()),
                _mean(seeds, "ours"),
                strong=_mean(seeds, "ours_strong"),
                samples=int(best["samples"]),
                masked=max(masked, default=None),
                untouched=max(theirs, key=theirs.__getitem__) in untouched_rows,
                **facts,
            )
        )
    return found


def _first(row) -> bool:
    """Whether it is of the seed that networks are chosen by."""
    return row.get("seed", "0") == "0"


def _mean(rows, key) -> float:
    return round(statistics.fmean(float(row[key]) for row in rows), 2)


def _row(table, rho, theirs, ours, **more):
    others = ("strong", "ceiling", "masked", "plain", "other", "untouched")
    return {
        "table": table,
        "rho": float(rho),
        "paper": theirs,
        "ours": ours,
        "gain": round(ours - theirs, 2),
        **{key: more.get(key) for key in others},
        "status": status(theirs, ours, **more),
    }


class Status(enum.StrEnum):
    """How our figure stands beside the paper's."""

    REACHED = "reached"
    LEVEL = "level"
    OTHER = "reached by another network"
    BEYOND = "beyond any classifier"
    UNSEEN = "unseen by the paper's attack"
    BEHIND = "behind"


def status(
    theirs: float,
    ours: float,
    samples: int,
    strong: float | None = None,
    ceiling: float | None = None,
    masked: float | None = None,
    plain: float | None = None,
    other: float | None = None,
    untouched: bool = False,
) -> Status:
    """What a cell of the summary says.

    Args:
        theirs: the paper's figure.
        ours: our best.
        samples: test images that ours is of.
        strong: what the same network of ours keeps under all attacks.
        ceiling: what no classifier can exceed.
        masked: what a network without defence gets under the same attack when
            its logits are so large that the attack sees no gradient.
        plain: what a network without defence gets under the same attack if
            it is trained as the paper trains.
        other: our best at this radius with other inputs, another network or
            a training for that radius.
        untouched: whether the paper's row has the same figure at a radius
            where no classifier can have it.
    """
    if is_beyond(theirs, ceiling):
        return Status.BEYOND
    if ours >= theirs:
        return Status.REACHED
    if theirs - ours <= chance(theirs, ours, samples):
        return Status.LEVEL
    if other is not None and other >= theirs:
        return Status.OTHER
    if untouched or (plain is not None and plain >= theirs - SAMPLING):
        return Status.UNSEEN
    if strong is None or masked is None:
        return Status.BEHIND
    if masked >= theirs and ours - strong > SAMPLING:
        return Status.UNSEEN
    return Status.BEHIND


def chance(theirs: float, ours: float, samples: int) -> float:
    """Percentage points that the choice of the images may make.

    Two standard deviations of the difference, but no more than `SAMPLING`:
    few images are no excuse.

    Args:
        theirs: the paper's figure, of `paper.SAMPLES` images.
        ours: our figure.
        samples: images that it is of.
    """
    share = (theirs + ours) / 200
    variance = share * (1 - share) * (1 / samples + 1 / paper.SAMPLES)
    return min(200 * math.sqrt(variance), SAMPLING)


def work(results: pathlib.Path) -> list[dict[str, Any]]:
    """Jobs and hours that the pages took, one row a kind of job.

    Args:
        results: folder of the pages, with the archive of their jobs.
    """
    found = []
    for path in sorted(results.glob("jobs/*/*.jsonl")):
        seconds = [
            from_line(line, str(path))["seconds"]
            for line in path.read_bytes().splitlines()
        ]
        hours = round(sum(seconds) / 3600, 1)
        found.append({"kind": path.stem, "jobs": len(seconds), "hours": hours})
    return found


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a page's CSV file; none if the page does not exist."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
