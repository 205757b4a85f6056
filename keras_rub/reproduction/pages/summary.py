"""Who wins where, and by how much: a page made of the other pages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import MASKED_FACTOR, ImagePlan
from keras_rub.reproduction.rows.protocol import SAMPLING
from keras_rub.reproduction.rows.summary import Status

_HEADS = {
    Status.REACHED: "ours at least the paper's",
    Status.LEVEL: "level",
    Status.OTHER: "reached by another network",
    Status.BEYOND: "paper's beyond any classifier",
    Status.UNSEEN: "unseen by the paper's attack",
    Status.BEHIND: "ours behind",
}
_OTHERS = {
    "fig_ranks": "average ranks over UCI data sets",
    "fig_improvement": "gains over PGD-Linf on UCI data sets",
    "fig_loss": "minimised and attacked loss",
    "tab_upper_bound": "how often the aRUB loss is an upper bound",
    "tab_speed": "training speed",
    "large_radii": "what the paper's figures at large radii mean",
}


def summary(
    plans: dict[str, ImagePlan],
    rows: list[dict[str, Any]],
    pages: Collection[str],
    work: list[dict[str, Any]],
) -> Page:
    """Compares every table that has been made with the paper's.

    Args:
        plans: from the paper's name of an image set to its plan.
        rows: of `rows.summary.summary`.
        pages: names of all pages that exist.
        work: of `rows.summary.work`.
    """
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    others = [f"[{t}]({n}.md)" for n, t in _OTHERS.items() if n in pages]
    return Page(
        name="summary",
        title="Summary: ours beside the paper",
        about=(
            "A cell is one radius of one table. In certified tables our best "
            "bound is compared with the paper's RUB row, in attacked tables "
            "our best defence with the paper's best, under the paper's "
            "attacks."
        ),
        units=["as on the page of each table."],
        body=[
            tables.to_markdown(
                ["table", "cells", *_HEADS.values(), "mean gain",
                 "smallest", "largest"],
                [_line(table, some) for table, some in by_table.items()],
            ),
            *_legend(rows),
            "Gains are in percentage points, over the cells that are reached, "
            "level or behind. Tables that are not listed have not been run in "
            "this budget.",
            "Other pages: " + (", ".join(others) or "none yet") + ".",
            *_work(work),
        ],
        differences=_differences(plans),
        rows=rows,
        figure=figures.gains(by_table),
    )  # fmt: skip


def _legend(rows):
    """What the colours mean, of those that there are."""
    texts = {
        Status.REACHED: "Blue: ours is at least the paper's.",
        Status.LEVEL: (
            "Light blue: ours is below by no more than the choice of the "
            "images may make, two standard deviations of the difference and "
            f"at most {SAMPLING:g} points."
        ),
        Status.OTHER: (
            "Green: this network is below the paper's figure, but another one "
            "of ours is not. In certified tables: one of another kind or with "
            "other inputs. The paper takes, radius by radius, the better of "
            "standardised inputs and pixels in [0, 1], where the same radius "
            "is a larger change, and does not say which it took. In attacked "
            "tables: one that was trained against attacks at such radii "
            "([large radii](large_radii.md))."
        ),
        Status.BEYOND: (
            "Grey: the paper's figure is beyond what any classifier can have "
            "([large radii](large_radii.md))."
        ),
        Status.UNSEEN: (
            "Yellow: ours is below the paper's figure, but that says little, "
            "for one of three reasons. A network without any defence, trained "
            f"as the paper trains, has the figure too, within {SAMPLING:g} "
            "points ([large radii](large_radii.md)). Or the paper's own row "
            "has the same figure at a radius where no classifier can have it "
            "(the same page). Or stronger attacks take more than "
            f"{SAMPLING:g} points off ours, and a network without any defence "
            "has the figure once its logits are multiplied by "
            f"{MASKED_FACTOR} (a row of the table's page)."
        ),
        Status.BEHIND: "Red: ours is below the paper's.",
    }
    found = {row["status"] for row in rows}
    return [" ".join(text for key, text in texts.items() if key in found)]


_KINDS = {
    "above": "UCI sets, losses under attack and their bounds",
    "attack": "image networks attacked",
    "ceiling": "ceilings",
    "certify": "radii certified, in parts",
    "inputs": "inputs described",
    "judge": "networks of the paper's search on test images",
    "large": "networks for large radii attacked",
    "loss": "training curves",
    "protocol": "networks of the paper's search, by rates",
    "rounding": "networks attacked by two losses",
    "scale": "networks with larger logits",
    "speed": "sets timed",
    "train": "image networks trained",
    "trial": "recipes tried",
    "uci": "UCI sets, all defences",
}


def _work(work):
    """What the pages took, of the jobs whose results are kept."""
    if not work:
        return []
    table = tables.to_markdown(
        ["jobs", "number", "hours"],
        [
            [_KINDS.get(row["kind"], row["kind"]), row["jobs"], row["hours"]]
            for row in work
        ],
    )
    hours = sum(row["hours"] for row in work)
    return [
        "## What it took",
        "Jobs whose results are kept beside the pages, each done by one "
        f"thread: {hours:.0f} hours in all, on cores that mostly did other "
        "work, too. Weights, batches and attacks take seed 0 where a page "
        "names no other.",
        table,
    ]


def _differences(plans):
    """How far the attacked tables of each set went."""
    return [
        f"{TITLES[name]}: in the attacked tables all defences but RUB are "
        f"trained for numbers up to {max(plan.numbers):g}, in at most "
        f"{plan.other.steps} steps; CNNs for numbers up to "
        f"{max(plan.cnn_numbers):g}, in at most {plan.cnn.steps} steps. The "
        f"paper: numbers up to {max(paper.NUMBERS):g}, {paper.IMAGES.steps} "
        "steps."
        for name, plan in plans.items()
    ]


def _line(table, rows):
    page, comma, rest = table.partition(",")
    compared = (Status.REACHED, Status.LEVEL, Status.BEHIND)
    gains = np.array([r["gain"] for r in rows if r["status"] in compared])
    return [
        f"[{page}]({page}.md){comma}{rest}",
        len(rows),
        *(sum(row["status"] == status for row in rows) for status in _HEADS),
        *(
            f"{function(gains):+.2f}" if len(gains) else "-"
            for function in (np.mean, np.min, np.max)
        ),
    ]
