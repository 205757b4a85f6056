"""Pages on losses during training and on speed."""

from __future__ import annotations

import numpy as np

from reproduction import (
    budgets,
    figures,
    losses,
    paper,
    report,
    speed,
    uci,
    vision,
)
from reproduction.context import Context
from reproduction.pages_uci import UNITS


def fig_loss(context: Context) -> None:
    """Minimised loss beside the loss under attack, over training."""
    plan = budgets.CURVES[context.budget]
    todo = losses.curve_jobs(plan, context)
    found = context.do(todo)
    curves = {
        (job.settings["defence"], job.settings["rho"]): found[job.name]
        for job in todo
        if job.name in found
    }
    if not curves:
        print("fig_loss: no network is finished yet")
        return
    rows = [
        {
            "defence": title,
            "rho": rho,
            "step": step,
            **{
                key: round(curve[key][index], 5)
                for key in ("minimised", "attacked", "clean")
            },
        }
        for (title, rho), curve in curves.items()
        for index, step in enumerate(curve["step"])
    ]
    summary = [
        [
            f"{title}, {rho:g}",
            f"{curve['minimised'][-1]:.3f}",
            f"{curve['attacked'][-1]:.3f}",
            f"{_share_above(curve):.0f} %",
        ]
        for (title, rho), curve in curves.items()
    ]
    report.write(
        context,
        "fig_loss",
        "The loss that is minimised and the loss under attack",
        about=(
            "A 3x200 network in training: is the loss that it minimises an "
            "upper bound of its loss under PGD-Linf attacks?"
        ),
        units=[f"{plan.dataset}, pixels in [0, 1]: a radius is in pixels."],
        body=[
            report.table(
                ["defence, rho", "minimised at the end", "under PGD-Linf",
                 "of the moments above"],
                summary,
            ),
            "The paper gives no figures for its plot; it shows that the aRUB "
            "loss stays above the attacked loss and close to it, while the "
            "Baseline loss falls below it as rho grows.",
        ],
        differences=[
            f"{plan.steps} steps instead of 10000; Adam from 1e-3 with cosine "
            f"decay, batches of {plan.batch_size} as in the paper.",
            f"Both losses are measured on {plan.samples} held-out samples, "
            f"every {plan.every} steps.",
        ],
        rows=rows,
        figure=figures.loss_curves(curves),
    )  # fmt: skip


def _share_above(curve):
    above = np.array(curve["minimised"]) >= np.array(curve["attacked"])
    return 100 * above.mean()


def tab_upper_bound(context: Context) -> None:
    """How often the aRUB loss is above the attacked loss."""
    plan = budgets.BOUNDS[context.budget]
    found = context.do(losses.bound_jobs(plan, context))
    cases = [row for result in found.values() for row in result["rows"]]
    if not cases:
        print("tab_upper_bound: no data set is finished yet")
        return
    rows, lines, panels = [], [], []
    for norm in ("inf", "1"):
        title = f"aRUB-L{norm}"
        theirs = paper.table("uci46", paper.ABOVE, norm)[title]
        ours = {}
        for number in plan.radii:
            some = [
                r for r in cases if (r["norm"], r["number"]) == (norm, number)
            ]
            ours[number] = 100 * np.mean([_is_above(r) for r in some])
            rows.append(
                {
                    "norm": norm,
                    "rho": number,
                    "paper": theirs.get(number),
                    "ours": round(ours[number], 2),
                    "cases": len(some),
                }
            )
        values = [theirs.get(number) for number in plan.radii]
        lines.append([f"L{norm}, paper", *map(report.percent, values)])
        lines.append(
            [f"L{norm}, ours", *(report.percent(v) for v in ours.values())]
        )
        panels.append(
            {
                "title": f"L{norm}",
                "radii": plan.radii,
                "xlabel": "radius rho"
                + (", times sqrt(features)" if norm == "1" else ""),
                "lines": [
                    figures.line(title, list(ours.values()), paper=False),
                    {
                        **figures.line(title, values, paper=True),
                        "color": "0.4",
                        "marker": "s",
                    },
                ],
            }
        )
    for panel in panels:
        for line, kind in zip(panel["lines"], ("ours", "paper"), strict=True):
            line["label"] = kind
            line["color"] = {"ours": "#c0392b", "paper": "0.4"}[kind]
            line["marker"] = {"ours": "o", "paper": "s"}[kind]
    report.write(
        context,
        "tab_upper_bound",
        "How often the aRUB loss is above the loss under PGD",
        about=(
            f"Percent of the cases, over {len(found)} data sets: a case is a "
            "network at one moment of its training and a radius; it counts if "
            "the mean aRUB loss is not below the mean loss under PGD attacks "
            "of the same norm and radius."
        ),
        units=UNITS,
        body=[
            report.table(
                ["norm", *(f"{number:g}" for number in plan.radii)], lines
            ),
        ],
        differences=[
            "At rho = 0 both losses are the same number; we allow a relative "
            "difference of 1e-5 for rounding, the paper seems not to.",
            f"{len(found)} sets instead of 46; training radii "
            f"{', '.join(f'{n:g}' for n in plan.training_numbers)}; "
            f"{plan.steps} steps, measured every {plan.every}.",
            "Our L1 attack shares each step among one feature in twenty and "
            "projects exactly; foolbox's L1 attack is weak, so that the "
            "paper's L1 row overstates.",
            "The label is not among the features.",
        ],
        rows=rows,
        figure=figures.curves(panels, "cases above, %", 2),
    )


def _is_above(row):
    return row["bound"] >= row["attacked"] * (1 - 1e-5) - 1e-7


def tab_speed(context: Context) -> None:
    """Batches a second, and the ratio to nominal training."""
    plan = budgets.SPEED[context.budget]
    found = context.do(speed.jobs(plan, context))
    rows, groups, body = [], [], []
    for title, data, names, defences in (
        ("UCI", "uci46", plan.tables, uci.DEFENCES),
        ("Images", "vision3", plan.images, vision.DEFENCES),
    ):
        names = [n.removeprefix("uci/") for n in names]
        measured = [
            found[f"speed-{n}"]["batches_per_second"]
            for n in names
            if f"speed-{n}" in found
        ]
        if not measured:
            continue
        theirs = paper.speeds(data)
        lines, ratios = [], {"paper": [], "ours": []}
        defences = [name for name in defences if name in plan.defences]
        for defence in defences:
            rates = np.array([m[defence] for m in measured])
            slower = np.array([m["Nominal"] / m[defence] for m in measured])
            rate, deviation = theirs[defence]
            factor = theirs["Nominal"][0] / rate
            ratios["paper"].append(factor)
            ratios["ours"].append(float(slower.mean()))
            lines.append(
                [
                    defence,
                    f"{rate:g} ± {deviation:g}",
                    f"{factor:.1f}",
                    f"{rates.mean():.1f} ± {rates.std():.1f}",
                    f"{slower.mean():.1f}",
                ]
            )
            rows.append(
                {
                    "data": title,
                    "defence": defence,
                    "paper_batches_per_second": rate,
                    "paper_nominal_over_defence": round(factor, 2),
                    "ours_batches_per_second": round(rates.mean(), 2),
                    "ours_deviation": round(rates.std(), 2),
                    "ours_nominal_over_defence": round(slower.mean(), 2),
                    "sets": len(measured),
                }
            )
        body += [
            f"## {title} ({len(measured)} sets)",
            report.table(
                ["defence", "paper, batches/s", "paper, times nominal",
                 "ours, batches/s", "ours, times nominal"],
                lines,
            ),
        ]  # fmt: skip
        groups.append(
            {
                "title": f"{title}, {len(measured)} sets",
                "names": defences,
                "values": ratios,
            }
        )
    if not groups:
        print("tab_speed: nothing is measured yet")
        return
    report.write(
        context,
        "tab_speed",
        "Training speed",
        about=(
            "Batches a second, and how many times the duration of a nominal "
            "step a step of each defence takes."
        ),
        units=["does not matter here; a step costs the same on any."],
        body=body,
        differences=[
            "Other hardware: only the ratios to nominal compare. All "
            "defences of a set take turns in one process, so that a busy "
            "machine slows them alike.",
            f"Batches of {plan.batch_size}, a 3x200 network, PGD with "
            f"{plan.attack_steps} steps; the compiled training step alone is "
            "timed, on one batch.",
            "RUB evaluates 32 screened vertices, which gives the loss of the "
            "paper's formula at a fraction of its cost; PGD is compiled.",
        ],
        rows=rows,
        figure=figures.bars(groups, "times the duration of nominal", log=True),
    )
