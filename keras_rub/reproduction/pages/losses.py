"""Pages on the losses during training."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.pages.ranks import UNITS
from keras_rub.reproduction.plans import BoundPlan, CurvePlan
from keras_rub.reproduction.rows.losses import (
    ALL,
    NEARLY,
    NORMS,
    OWN,
    ROUNDING,
    SHARES,
    SMALLEST,
    averages,
)


def fig_loss(plan: CurvePlan, rows: list[dict[str, Any]]) -> Page:
    """Minimised loss beside the loss under attack, over training.

    Args:
        plan: `CurvePlan`.
        rows: of `rows.losses.curves`.
    """
    curves = _by_network(rows)
    recipe = plan.recipe(plan.defences[0], plan.radii[0])
    return Page(
        name="fig_loss",
        title="The loss that is minimised and the loss under attack",
        about=(
            f"A {words.network(recipe)} network in training: is the loss that "
            "it minimises an upper bound of its loss under PGD-Linf attacks?"
        ),
        units=[f"{plan.dataset}, pixels in [0, 1]: a radius is in pixels."],
        body=[
            _ends(curves),
            "The paper gives no figures for its plot; it shows that the aRUB "
            "loss stays above the attacked loss and close to it, while the "
            "Baseline loss falls below it as rho grows.",
        ],
        differences=[
            f"{recipe.steps} steps instead of {paper.IMAGES.steps}; "
            f"{words.optimizer(recipe)}, batches of {recipe.batch_size} "
            + (
                "as in the paper."
                if recipe.batch_size == paper.IMAGES.small_batch_size
                else f"instead of {paper.IMAGES.small_batch_size}."
            ),
            f"Both losses are measured on {plan.samples} held-out samples, "
            f"every {plan.every} steps.",
        ],
        rows=rows,
        figure=figures.loss_curves(curves),
    )


def _by_network(rows) -> dict[tuple[str, float], dict[str, list]]:
    found: dict[tuple[str, float], dict[str, list]] = {}
    for row in rows:
        curve = found.setdefault((row["defence"], row["rho"]), {})
        for key in ("step", "minimised", "attacked", "clean"):
            curve.setdefault(key, []).append(row[key])
    return found


def _ends(curves):
    def share_above(curve):
        above = np.array(curve["minimised"]) >= np.array(curve["attacked"])
        return 100 * above.mean()

    return tables.to_markdown(
        ["defence, rho", "minimised at the end", "under PGD-Linf",
         "of the moments above"],
        [
            [
                f"{title}, {rho:g}",
                f"{curve['minimised'][-1]:.3f}",
                f"{curve['attacked'][-1]:.3f}",
                f"{share_above(curve):.0f} %",
            ]
            for (title, rho), curve in curves.items()
        ],
    )  # fmt: skip


def tab_upper_bound(
    plan: BoundPlan, rows: list[dict[str, Any]], sets: int
) -> Page:
    """How often the aRUB loss is above the attacked loss.

    Args:
        plan: `BoundPlan`.
        rows: of `rows.losses.above`.
        sets: number of data sets that are finished.
    """
    by_norm = {
        norm: [r for r in rows if (r["norm"], r["networks"]) == (norm, ALL)]
        for norm in NORMS
    }
    return Page(
        name="tab_upper_bound",
        title="How often the aRUB loss is above the loss under PGD",
        about=(
            f"Percent of the cases, over {sets} data sets: a case is a "
            "network at one moment of its training and a radius; it counts if "
            "the mean aRUB loss is not below the mean loss under PGD attacks "
            "of the same norm and radius."
        ),
        units=UNITS,
        body=[
            _above_table(plan, by_norm),
            "From *authors' protocol* to *training samples* each row changes "
            "one thing. The authors' published code asks all networks at all "
            "radii, on test samples, under foolbox's PGD with its defaults and "
            "input bounds that no attack reaches; what their notebook prints "
            "is within a point of the paper's row. Its bound is the logarithm "
            "of a sum of exponentials in float32: infinite, and so above, "
            "where a margin exceeds 88. Its L1 bound is that of sqrt(features) "
            "times the radius of the attack. *Same radius* takes the bound as "
            "it is meant: at the radius of the attack, without overflow. *Our "
            "attack* can cross the ball: its steps are 2.5 radii in all, and "
            "for L1 each moves one feature in twenty and is projected exactly. "
            "*Training samples* are those that the loss is minimised on.",
            *explanation(rows),
            "## Which networks",
            "Authors' protocol / our attack / our attack on training samples, "
            "by learning rate, by the radius of the training, and for the "
            "networks that were trained for the radius itself:",
            _networks_table(plan, rows),
            *spread(rows),
        ],
        differences=[
            f"{sets} of {paper.SETS} sets; learning rates "
            f"{words.numbers(plan.rates)}; training "
            f"radii {words.numbers(plan.training_numbers)}; {plan.steps} steps "
            f"of {plan.batch_size} instead of "
            f"{paper.TABLES.steps} of {paper.TABLES.batch_size}, "
            f"measured every {plan.every}. The paper's caption says every 500 "
            "steps; its code measures the last state that was saved.",
            "Networks are trained by aRUB of the row's norm. The published "
            "code counts those of all its defences, with one and with three "
            "hidden layers.",
            "In all rows but the authors' protocol a relative difference of "
            f"{words.power(ROUNDING)}, and an absolute one of "
            f"{words.power(SMALLEST)}, is rounding: at rho = 0 both losses are "
            "the same number.",
            "The label is not among the features.",
        ],
        rows=rows,
        figure=figures.curves(
            [_above_panel(norm, some) for norm, some in by_norm.items()],
            "cases above, %",
            3,
        ),
    )


# Titles of the shares, the paper's own first.
_TITLES = {
    "paper": "paper",
    "theirs": "authors' protocol",
    "same_radius": "same radius",
    "ours": "our attack",
    "ours_train": "our attack, training samples",
    "ours_nearly": f"our attack, above or {100 * NEARLY:g} % below",
}


def _above_table(plan, by_norm):
    return tables.to_markdown(
        ["norm", *(f"{number:g}" for number in plan.radii)],
        [
            [f"L{norm}, {title}", *(words.cell(row[key]) for row in some)]
            for norm, some in by_norm.items()
            for key, title in _TITLES.items()
        ],
    )


# Percentage points, a mean over radii: a smaller fall is not worth a reason.
_SMALL = 5

# Why a share falls, from the norm and its name.
_REASONS = {
    ("inf", "same_radius"): "A bound that overflows is above any loss.",
    ("1", "same_radius"): (
        "A bound at a larger radius than the attack's, or one that overflows, "
        "says nothing of the loss."
    ),
    ("inf", "ours"): (
        "foolbox takes 40 steps of a thirtieth of the radius from a random "
        "start: a feature that starts at the wrong end would need 60. So it "
        "stops short of the maximum of the linearised margins, which the aRUB "
        "loss takes, and can be below it even where margins curve upwards."
    ),
    ("1", "ours"): (
        "foolbox shares each step among all features, where the worst "
        "perturbation moves one. So it stops short of the maximum of the "
        "linearised margins, which the aRUB loss takes, and can be below it "
        "even where margins curve upwards."
    ),
}


def explanation(rows: list[dict[str, Any]]) -> list[str]:
    """What makes how many points, and why a share falls; a text a norm.

    Args:
        rows: of `rows.losses.above`.
    """
    return [_explanation(rows, norm) for norm in NORMS]


def _explanation(rows, norm):
    means = averages(rows, norm, ALL)
    steps = {
        name: means[name] - means[before]
        for before, name in itertools.pairwise(SHARES)
    }
    parts = [
        f"{_TITLES[name]} {means[name]:.0f} ({round(step):+d})"
        for name, step in steps.items()
    ]
    text = [
        f"**L{norm}**, mean over the radii above 0: paper "
        f"{means['paper']:.0f} %, authors' protocol {means['theirs']:.0f}, "
        f"{', '.join(parts)}."
    ]
    text += [
        _REASONS[norm, name]
        for name, step in steps.items()
        if step <= -_SMALL and (norm, name) in _REASONS
    ]
    text += [
        "At rho = 0 both losses are the same number but for rounding, which "
        f"leaves {row['theirs']:.0f} % in the authors' protocol and "
        f"{row['paper']:.0f} % in the paper."
        for row in rows
        if (row["norm"], row["networks"], row["rho"]) == (norm, ALL, 0.0)
    ]
    return " ".join(text)


def _networks_table(plan, rows):
    keys = ("theirs", "ours", "ours_train")
    cells = {
        (row["norm"], row["networks"], row["rho"]): " / ".join(
            "-" if row[key] is None else f"{row[key]:.0f}" for key in keys
        )
        for row in rows
    }
    choices = [name for name in _choices(rows) if name != ALL]
    return tables.to_markdown(
        ["norm, networks", *(f"{number:g}" for number in plan.radii)],
        [
            [
                f"L{norm}, {name}",
                *(cells.get((norm, name, rho), "-") for rho in plan.radii),
            ]
            for norm in NORMS
            for name in choices
        ],
    )


def _choices(rows):
    """Names of the choices of networks, in their order."""
    return list(dict.fromkeys(row["networks"] for row in rows))


def spread(rows: list[dict[str, Any]]) -> list[str]:
    """What the choice of networks makes; a text a norm.

    Args:
        rows: of `rows.losses.above`.
    """
    return [_spread(rows, norm) for norm in NORMS]


def _spread(rows, norm):
    radii = sorted({row["rho"] for row in rows if row["networks"] == OWN})
    here = [row for row in rows if row["rho"] in radii]
    own, every = (averages(here, norm, name) for name in (OWN, ALL))
    return (
        f"**L{norm}**, mean over the radii above 0, our attack: "
        f"{_ranges(rows, norm, 'ours')}; on training samples "
        f"{_ranges(rows, norm, 'ours_train')}. At radii "
        f"{words.numbers(radii)} the networks that were trained for them have "
        f"{own['theirs']:.0f} % by the authors' protocol and "
        f"{own['ours']:.0f} % under our attack, all networks "
        f"{every['theirs']:.0f} % and {every['ours']:.0f} %."
    )


def _ranges(rows, norm, share):
    """The extremes of a share by rate, and by training radius."""
    found = []
    for kind in ("rate", "trained"):
        means = {
            name: averages(rows, norm, name)[share]
            for name in _choices(rows)
            if name.startswith(kind) and averages(rows, norm, name)
        }
        low, high = (f(means, key=lambda name: means[name]) for f in (min, max))
        found.append(
            f"{means[low]:.0f} % ({low}) to {means[high]:.0f} % ({high})"
        )
    return ", ".join(found)


def _above_panel(norm, rows):
    factor = ", times sqrt(features)" if norm == "1" else ""
    return {
        "title": f"L{norm}",
        "radii": [row["rho"] for row in rows],
        "xlabel": f"radius rho{factor}",
        "lines": [
            {
                **figures.line(
                    f"aRUB-L{norm}",
                    [row[kind] for row in rows],
                    kind == "paper",
                ),
                "label": _TITLES[kind],
                "color": colour,
                "marker": marker,
            }
            for kind, colour, marker in (
                ("paper", "0.4", "s"),
                ("theirs", "#1f6f8b", "D"),
                ("same_radius", "#e08e0b", "^"),
                ("ours", "#c0392b", "o"),
                ("ours_train", "#7d3c98", "v"),
            )
        ],
    }
