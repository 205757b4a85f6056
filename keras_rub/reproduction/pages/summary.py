"""Who wins where, and by how much: a page made of the other pages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import ImagePlan

_OTHERS = {
    "fig_ranks": "average ranks over UCI data sets",
    "fig_improvement": "gains over PGD-Linf on UCI data sets",
    "fig_loss": "minimised and attacked loss",
    "tab_upper_bound": "how often the aRUB loss is an upper bound",
    "tab_speed": "training speed",
}


def summary(
    plan: ImagePlan, rows: list[dict[str, Any]], pages: Collection[str]
) -> Page:
    """Compares every table that has been made with the paper's.

    Args:
        plan: `ImagePlan`.
        rows: of `rows.summary.summary`.
        pages: names of all pages that exist.
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
                ["table", "cells", "ours at least the paper's", "mean gain",
                 "smallest", "largest"],
                [
                    _line(table, np.array([row["gain"] for row in some]))
                    for table, some in by_table.items()
                ],
            ),
            "Gains are in percentage points. Tables that are not listed have "
            "not been run in this budget.",
            "Other pages: " + (", ".join(others) or "none yet") + ".",
        ],
        differences=[
            "In the attacked tables all defences but RUB are trained for "
            f"numbers up to {max(plan.numbers):g}, in at most "
            f"{plan.other.steps} steps; CNNs for numbers up to "
            f"{max(plan.cnn_numbers):g}, in at most {plan.cnn.steps} steps. "
            f"The paper: numbers up to {max(paper.NUMBERS):g}, "
            f"{paper.IMAGES.steps} steps.",
            "The pages tell at which radii every test image can be turned into "
            "the same one. There the paper's lead shows the limits of its "
            "attack.",
        ],
        rows=rows,
        figure=figures.gains(by_table),
    )  # fmt: skip


def _line(table, gains):
    page, comma, rest = table.partition(",")
    return [
        f"[{page}]({page}.md){comma}{rest}",
        len(gains),
        int(np.sum(gains >= 0)),
        f"{gains.mean():+.2f}",
        f"{gains.min():+.2f}",
        f"{gains.max():+.2f}",
    ]
