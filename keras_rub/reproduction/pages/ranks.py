"""Pages on UCI sets: ranks of the defences, and gains set by set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import TablePlan
from keras_rub.reproduction.rows.tables import NORMS, RIVAL

UNITS = (
    "features standardised with the training rows. An Linf or L2 radius of 1 "
    "is one standard deviation; an L1 radius is the number times the square "
    "root of the number of features, as in the paper.",
)

_MUCH = 15  # percentage points; the paper counts the sets that gain more


def fig_ranks(
    plan: TablePlan,
    rows: list[dict[str, Any]],
    leaks: list[dict[str, Any]],
    finished: Iterable[str],
) -> Page:
    """Average ranks of the defences under attack.

    Args:
        plan: `TablePlan`.
        rows: of `rows.tables.ranks`.
        leaks: of `rows.tables.leaks`.
        finished: names of the sets that the rows are of.
    """
    names = [name.removeprefix("uci/") for name in finished]
    groups = {
        (kind, norm): [
            row for row in rows if (row["attack"], row["norm"]) == (kind, norm)
        ]
        for norm in NORMS
        for kind in plan.attacks
    }
    return Page(
        name="fig_ranks",
        title="Average ranks over UCI data sets",
        about=(
            f"{len(plan.defences)} defences on {len(names)} data sets: each "
            "set ranks them by accuracy under attack; shown is the average "
            "rank with its 95 % interval. For each defence, attack and radius "
            "the network is chosen on validation samples."
        ),
        units=UNITS,
        body=[
            "Best average rank by attack and number:",
            _winners(groups),
            "The paper gives no figures for its plot. What it says of it: "
            "aRUB-Linf and PGD-Linf lead below 0.1, then for a short range "
            "PGD-Linf, and RUB at large radii; at 0 the robust defences are "
            "more accurate than Nominal.",
            _leak_part(leaks),
            f"{len(names)} of {len(plan.sets)} sets are finished"
            + (
                "; the same command goes on with the others"
                if len(names) < len(plan.sets)
                else ""
            )
            + f". Finished: {', '.join(names)}.",
        ],
        differences=_differences(plan),
        rows=rows,
        figure=figures.ranks(
            [_rank_panel(*key, some) for key, some in groups.items()]
        ),
    )


def _differences(plan):
    recipe = plan.recipe(plan.defences[0], plan.rates[0], plan.batch_size)
    return [
        "The paper's inputs contain the label as their last feature. "
        "Ours don't (see above for what that changes).",
        f"Networks a defence and set: {len(plan.training_numbers)} "
        f"training radii (numbers {words.numbers(plan.training_numbers)}), "
        f"{len(plan.rates)} learning rate(s), {plan.steps} steps of "
        f"{plan.batch_size}; the paper: {len(paper.NUMBERS)} radii, "
        f"{len(paper.RATES)} rates, {paper.TABLES.steps} steps of "
        f"{paper.TABLES.batch_size}.",
        words.ramped(recipe),
        f"Attacks are compiled FGM and PGD ({plan.attack_steps} steps) with "
        "exact projections instead of foolbox's. A sample that is lost at one "
        "radius counts as lost at larger ones.",
        f"At most {plan.samples} test samples a set.",
    ]


def _winners(groups):
    numbers = sorted(
        {row["number"] for rows in groups.values() for row in rows}
    )
    return tables.to_markdown(
        ["attack", *(f"{number:g}" for number in numbers)],
        [
            [
                f"{kind.upper()}-L{norm}",
                *(_winner(rows, number) for number in numbers),
            ]
            for (kind, norm), rows in groups.items()
        ],
    )


def _winner(rows, number):
    some = [r for r in rows if r["number"] == number]
    best = min(r["mean_rank"] for r in some)
    names = [r["defence"] for r in some if r["mean_rank"] == best]
    if len(names) == len(some):
        return "all equal"
    return f"{', '.join(names)} ({best:.2f})"


def _rank_panel(kind, norm, rows):
    def of(defence, key):
        return [r[key] for r in rows if r["defence"] == defence]

    factor = " (times sqrt(features))" if norm == 1 else ""
    return {
        "title": f"{kind.upper()}-L{norm}",
        "numbers": sorted({row["number"] for row in rows}),
        "xlabel": f"L{norm} radius rho{factor}, standardised features",
        "curves": {
            defence: (of(defence, "mean_rank"), of(defence, "half_interval"))
            for defence in dict.fromkeys(r["defence"] for r in rows)
        },
    }


def _leak_part(leaks):
    title = "## What the label among the features does\n\n"
    if not leaks:
        return f"{title}The sets for this comparison are not finished yet."
    header = [
        f"PGD-Linf {number:g}" if number else "clean"
        for number in leaks[0]["cells"]
    ]
    lines = [
        [
            f"{row['set']}, {row['defence']}",
            *(f"{plain:.1f} / {leak:.1f}" for plain, leak in cells.values()),
        ]
        for row in leaks
        if (cells := row["cells"])
    ]
    return (
        f"{title}Accuracy in percent, without / with the standardised label "
        "as a last feature. With it, a network need only copy one input: clean "
        "accuracy and accuracy at small radii say nothing about the data.\n\n"
        + tables.to_markdown(["set, defence", *header], lines)
    )


def fig_improvement(rows: list[dict[str, Any]], sets: int) -> Page:
    """How much RUB and aRUB-Linf gain over PGD-Linf.

    Args:
        rows: of `rows.tables.gains`.
        sets: number of data sets that are finished.
    """
    panels: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        title = (
            f"{row['defence']} over {RIVAL}, "
            f"PGD-L{row['attack'].removeprefix('pgd-')} "
            f"rho = {row['number']:g}"
        )
        line = panels.setdefault(row["defence"], {})
        line.setdefault(title, []).append(row["gain"])
    return Page(
        name="fig_improvement",
        title="Gains of RUB and aRUB-Linf over PGD-Linf",
        about=(
            f"On how many of {sets} data sets a defence gains so many "
            "percentage points of attacked accuracy over PGD-Linf."
        ),
        units=UNITS,
        body=[
            tables.to_markdown(
                ["defence, attack, rho", "sets better", "equal", "worse",
                 f"gain above {_MUCH}", "mean gain"],
                [
                    _gain_line(title, np.array(gains))
                    for line in panels.values()
                    for title, gains in line.items()
                ],
            ),
            "The paper, in words: at rho = 10 under PGD-L2, RUB is worse than "
            f"PGD-Linf on 3 of {paper.SETS} sets and more than {_MUCH} % "
            "better on 8. aRUB-Linf is slightly better at rho = 0.001 and 0.1 "
            "and clearly worse at 1.",
        ],
        differences=["As on [the page of the ranks](fig_ranks.md)."],
        rows=rows,
        figure=figures.histograms(
            [
                [
                    {"title": title, "gains": gains, "colour": defence}
                    for title, gains in line.items()
                ]
                for defence, line in panels.items()
            ]
        ),
    )  # fmt: skip


def _gain_line(title, gains):
    return [
        title,
        int(np.sum(gains > 0)),
        int(np.sum(gains == 0)),
        int(np.sum(gains < 0)),
        int(np.sum(gains > _MUCH)),
        f"{gains.mean():+.2f}",
    ]
