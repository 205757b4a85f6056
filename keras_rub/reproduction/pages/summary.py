"""Who wins where, and by how much: a page made of the other pages."""

from __future__ import annotations

import numpy as np

from reproduction import budgets, figures, report
from reproduction.context import Context
from reproduction.pages_vision import best_of

_SETS = ("fashion", "mnist", "cifar")


def summary(context: Context) -> None:
    """Compares every table that has been made with the paper's."""
    rows = [
        row
        for name in _SETS
        for row in (
            *_certified(context, name),
            *_attacked(context, name, "tab_"),
            *_attacked(context, name, "tab_cnn_"),
        )
    ]
    if not rows:
        print("summary: no table of images is finished yet")
        return
    tables = list(dict.fromkeys(row["table"] for row in rows))
    lines = []
    for table in tables:
        some = [row for row in rows if row["table"] == table]
        gains = np.array([row["gain"] for row in some])
        lines.append(
            [
                _link(table),
                len(some),
                int(np.sum(gains >= 0)),
                f"{gains.mean():+.2f}",
                f"{gains.min():+.2f}",
                f"{gains.max():+.2f}",
            ]
        )
    report.write(
        context,
        "summary",
        "Summary: ours beside the paper",
        about=(
            "A cell is one radius of one table. In certified tables our best "
            "bound is compared with the paper's RUB row, in attacked tables "
            "our best defence with the paper's best, under the paper's "
            "attacks."
        ),
        units=["as on the page of each table."],
        body=[
            report.table(
                ["table", "cells", "ours at least the paper's", "mean gain",
                 "smallest", "largest"],
                lines,
            ),
            "Gains are in percentage points. Tables that are not listed have "
            "not been run in this budget.",
            _others(context),
        ],
        differences=_differences(budgets.VISION[context.budget]),
        rows=rows,
        figure=figures.gains(
            {t: [r for r in rows if r["table"] == t] for t in tables}
        ),
    )  # fmt: skip


def _differences(plan):
    numbers, cnn_numbers = max(plan.numbers), max(plan.cnn_numbers)
    return [
        "In the attacked tables all defences but RUB are trained for numbers "
        f"up to {numbers:g}, in at most {plan.other.steps} steps; CNNs for "
        f"numbers up to {cnn_numbers:g}, in at most {plan.cnn.steps} steps. "
        "The paper: numbers up to 10, 10000 steps.",
        "The pages tell at which radii every test image can be turned into the "
        "same one. There the paper's lead shows the limits of its attack.",
    ]


def _link(table):
    page, comma, rest = table.partition(",")
    return f"[{page}]({page}.md){comma}{rest}"


def _certified(context, name):
    table = f"tab_bounds_{name}"
    return [
        {
            "table": f"{table}, {row['normalization']}",
            "rho": float(row["rho"]),
            "paper": float(row["paper_rub"]),
            "ours": best_of(row),
            "gain": round(best_of(row) - float(row["paper_rub"]), 2),
        }
        for row in report.read_rows(context, table)
    ]


def _attacked(context, name, stem):
    cells: dict = {}
    for row in report.read_rows(context, stem + name):
        key = (row["norm"], float(row["rho"]))
        ours, theirs = cells.setdefault(key, ([], []))
        ours.append(float(row["ours"]))
        if row["paper"]:
            theirs.append(float(row["paper"]))
    return [
        {
            "table": f"{stem}{name}, L{norm}",
            "rho": rho,
            "paper": max(theirs),
            "ours": max(ours),
            "gain": round(max(ours) - max(theirs), 2),
        }
        for (norm, rho), (ours, theirs) in cells.items()
        if theirs
    ]


def _others(context):
    pages = {
        "fig_ranks": "average ranks over UCI data sets",
        "fig_improvement": "gains over PGD-Linf on UCI data sets",
        "fig_loss": "minimised and attacked loss",
        "tab_upper_bound": "how often the aRUB loss is an upper bound",
        "tab_speed": "training speed",
    }
    found = [
        f"[{title}]({name}.md)"
        for name, title in pages.items()
        if (context.results / f"{name}.md").exists()
    ]
    return "Other pages: " + (", ".join(found) or "none yet") + "."
