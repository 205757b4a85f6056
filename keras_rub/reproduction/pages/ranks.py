"""Pages on tables of numbers: ranks, gains, and what a leak does."""

from __future__ import annotations

import numpy as np
from scipy import stats

from reproduction import budgets, figures, report, uci
from reproduction.context import Context

UNITS = (
    "features standardised with the training rows. An Linf or L2 radius of 1 "
    "is one standard deviation; an L1 radius is the number times the square "
    "root of the number of features, as in the paper.",
)


def collect(context: Context, leak: bool = False) -> dict[str, dict]:
    """Results by data set, of the sets where every job is done."""
    plan = budgets.UCI[context.budget]
    todo = uci.jobs(plan, context.load, leak)
    found = context.do(todo)
    by_set: dict[str, dict] = {}
    for job in todo:
        name = job.settings["set"]
        if job.name in found:
            entry = by_set.setdefault(name, {"networks": [], "jobs": 0})
            entry["jobs"] += 1
            entry["networks"] += found[job.name]["networks"]
    return {
        name: entry
        for name, entry in by_set.items()
        if entry["jobs"] == len(plan.rates)
    }


def chosen(entry: dict, defence: str, key: str, place: int | None) -> float:
    """Test accuracy of the network that is best on validation samples.

    Args:
        entry: of `collect`.
        defence: name of the defence.
        key: `"clean"`, or an attack and its norm such as `"pgd-inf"`.
        place: which of the numbers; `None` with `"clean"`.
    """

    def accuracy(network, part):
        value = network[part][key]
        return value if place is None else value[place]

    networks = [n for n in entry["networks"] if n["defence"] == defence]
    # The clean accuracy decides a tie.
    best = max(
        networks,
        key=lambda n: (accuracy(n, "validation"), n["validation"]["clean"]),
    )
    return accuracy(best, "test")


def rank_rows(found: dict[str, dict], plan: uci.Plan) -> list[dict]:
    """Mean rank and accuracy, one row an attack, number and defence."""
    rows = []
    for kind in uci.ATTACKS:
        for norm in (2, "inf", 1):
            places = [("clean", None, 0.0)]
            places += [
                (f"{kind}-{norm}", place, number)
                for place, number in enumerate(plan.numbers)
            ]
            for key, place, number in places:
                accuracy = np.array(
                    [
                        [chosen(e, d, key, place) for d in plan.defences]
                        for e in found.values()
                    ]
                )
                ranks = stats.rankdata(-accuracy, axis=1)
                half = 1.96 * ranks.std(axis=0, ddof=min(1, len(ranks) - 1))
                half /= np.sqrt(len(ranks))
                for column, defence in enumerate(plan.defences):
                    rows.append(
                        {
                            "attack": kind,
                            "norm": norm,
                            "number": number,
                            "defence": defence,
                            "mean_rank": round(ranks[:, column].mean(), 3),
                            "half_interval": round(half[column], 3),
                            "mean_accuracy": round(
                                100 * accuracy[:, column].mean(), 2
                            ),
                            "sets": len(found),
                        }
                    )
    return rows


def fig_ranks(context: Context) -> None:
    """Average ranks of the defences under attack."""
    plan = budgets.UCI[context.budget]
    found = collect(context)
    leaked = collect(context, leak=True)
    if not found:
        print("fig_ranks: no data set is finished yet")
        return
    rows = rank_rows(found, plan)
    panels, winners = [], []
    for norm in (2, "inf", 1):
        for kind in uci.ATTACKS:
            some = [r for r in rows if (r["attack"], r["norm"]) == (kind, norm)]
            numbers = sorted({r["number"] for r in some})
            panels.append(_rank_panel(kind, norm, numbers, some))
            winners.append(
                [
                    f"{kind.upper()}-L{norm}",
                    *(_winner(some, number) for number in numbers),
                ]
            )
    report.write(
        context,
        "fig_ranks",
        "Average ranks over UCI data sets",
        about=(
            f"{len(plan.defences)} defences on {len(found)} data sets: each "
            "set ranks them by accuracy under attack; shown is the average "
            "rank with its 95 % interval. For each defence, attack and radius "
            "the network is chosen on validation samples."
        ),
        units=UNITS,
        body=[
            "Best average rank by attack and number:",
            report.table(
                ["attack", *(f"{number:g}" for number in numbers)], winners
            ),
            "The paper gives no figures for its plot. What it says of it: "
            "aRUB-Linf and PGD-Linf lead below 0.1, then for a short range "
            "PGD-Linf, and RUB at large radii; at 0 the robust defences are "
            "more accurate than Nominal.",
            _leak_part(found, leaked, plan.numbers),
            f"{len(found)} of {len(plan.sets)} sets are finished; the same "
            "command goes on with the others. Finished: "
            + ", ".join(name.removeprefix("uci/") for name in found)
            + ".",
        ],
        differences=[
            "The paper's inputs contain the label as their last feature. "
            "Ours don't (see above for what that changes).",
            f"Networks a defence and set: {len(plan.training_numbers)} "
            f"training radii (numbers {_list(plan.training_numbers)}), "
            f"{len(plan.rates)} learning rate(s), {plan.steps} steps of "
            f"{plan.batch_size}; the paper: 11 radii, 7 rates, 5000 steps of "
            "256.",
            "The radius is ramped up over the first half of the training.",
            "Attacks are compiled FGM and PGD (40 steps) with exact "
            "projections instead of foolbox's. A sample that is lost at one "
            "radius counts as lost at larger ones.",
            f"At most {plan.samples} test samples a set.",
        ],
        rows=rows,
        figure=figures.ranks(panels),
    )


def _rank_panel(kind, norm, numbers, rows):
    def of(defence, key):
        return [r[key] for r in rows if r["defence"] == defence]

    factor = " (times sqrt(features))" if norm == 1 else ""
    return {
        "title": f"{kind.upper()}-L{norm}",
        "numbers": numbers,
        "xlabel": f"L{norm} radius rho{factor}, standardised features",
        "curves": {
            defence: (of(defence, "mean_rank"), of(defence, "half_interval"))
            for defence in dict.fromkeys(r["defence"] for r in rows)
        },
    }


def _winner(rows, number):
    some = [r for r in rows if r["number"] == number]
    best = min(r["mean_rank"] for r in some)
    names = [r["defence"] for r in some if r["mean_rank"] == best]
    if len(names) == len(some):
        return "all equal"
    return f"{', '.join(names)} ({best:.2f})"


def _leak_part(found, leaked, numbers):
    places = [
        (f"PGD-Linf {number:g}", "pgd-inf", place)
        for place, number in enumerate(numbers)
        if number in (0.1, 0.3, 1.0)
    ]
    columns = [("clean", "clean", None), *places]
    rows = []
    for name, entry in leaked.items():
        if name not in found:
            continue
        for defence in ("RUB", "aRUB-Linf", "PGD-Linf", "Nominal"):
            cells = []
            for _, key, place in columns:
                plain = 100 * chosen(found[name], defence, key, place)
                leak = 100 * chosen(entry, defence, key, place)
                cells.append(f"{plain:.1f} / {leak:.1f}")
            rows.append([f"{name.removeprefix('uci/')}, {defence}", *cells])
    title = "## What the label among the features does\n\n"
    if not rows:
        return f"{title}The sets for this comparison are not finished yet."
    return (
        f"{title}Accuracy in percent, without / with the standardised label "
        "as a last feature. With it, a network need only copy one input: clean "
        "accuracy and accuracy at small radii say nothing about the data.\n\n"
        + report.table(["set, defence", *(c[0] for c in columns)], rows)
    )


def fig_improvement(context: Context) -> None:
    """How much RUB and aRUB-Linf gain over PGD-Linf."""
    plan = budgets.UCI[context.budget]
    found = collect(context)
    if not found:
        print("fig_improvement: no data set is finished yet")
        return
    rows, panels = [], []
    for defence, key, numbers in (
        ("RUB", "pgd-2", (0.01, 1.0, 10.0)),
        ("aRUB-Linf", "pgd-inf", (0.001, 0.1, 1.0)),
    ):
        norm = key.removeprefix("pgd-")
        line = []
        # The smallest budget knows fewer numbers.
        for number in (n for n in numbers if n in plan.numbers):
            some = _gain_rows(found, defence, key, number, plan)
            rows += some
            line.append(
                {
                    "title": f"{defence} over PGD-Linf, "
                    f"PGD-L{norm} rho = {number:g}",
                    "gains": [row["gain"] for row in some],
                    "colour": defence,
                }
            )
        panels.append(line)
    report.write(
        context,
        "fig_improvement",
        "Gains of RUB and aRUB-Linf over PGD-Linf",
        about=(
            f"On how many of {len(found)} data sets a defence gains so many "
            "percentage points of attacked accuracy over PGD-Linf."
        ),
        units=UNITS,
        body=[
            report.table(
                ["defence, attack, rho", "sets better", "equal", "worse",
                 "gain above 15", "mean gain"],
                _gain_summary(panels),
            ),
            "The paper, in words: at rho = 10 under PGD-L2, RUB is worse than "
            "PGD-Linf on 3 of 46 sets and more than 15 % better on 8. "
            "aRUB-Linf is slightly better at rho = 0.001 and 0.1 and clearly "
            "worse at 1.",
        ],
        differences=["As on [the page of the ranks](fig_ranks.md)."],
        rows=rows,
        figure=figures.histograms(panels),
    )  # fmt: skip


def _gain_rows(found, defence, key, number, plan):
    """One row a data set."""
    place = plan.numbers.index(number)
    rows = []
    for name, entry in found.items():
        ours, theirs = (
            100 * chosen(entry, d, key, place) for d in (defence, "PGD-Linf")
        )
        rows.append(
            {
                "defence": defence,
                "attack": key,
                "number": number,
                "set": name.removeprefix("uci/"),
                "accuracy": round(ours, 2),
                "accuracy_pgd_linf": round(theirs, 2),
                "gain": round(ours - theirs, 2),
            }
        )
    return rows


def _gain_summary(panels):
    rows = []
    for panel in (panel for row in panels for panel in row):
        gains = np.array(panel["gains"])
        rows.append(
            [
                panel["title"],
                int(np.sum(gains > 0)),
                int(np.sum(gains == 0)),
                int(np.sum(gains < 0)),
                int(np.sum(gains > 15)),
                f"{gains.mean():+.2f}",
            ]
        )
    return rows


def _list(numbers):
    return ", ".join(f"{number:g}" for number in numbers)
