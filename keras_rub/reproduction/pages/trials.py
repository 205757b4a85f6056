"""The page on recipes that were tried."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import TrialPlan
from keras_rub.reproduction.rows import trials as rows_of


def trials(plan: TrialPlan, rows: list[dict[str, Any]]) -> Page:
    """What each recipe comes to on held-out images.

    Args:
        plan: `TrialPlan`.
        rows: of `rows.trials.trials`.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_title(row), []).append(row)
    body = []
    bases = {_title(rows_of.trial(t)): t.base for t in plan.trials}
    for title, some in groups.items():
        body += [f"## {title}", _base(bases[title]), _table(some)]
    body.append(_chance(plan))
    return Page(
        name="trials",
        title="Recipes that were tried",
        about=(
            "How the networks of the tables came to be trained as they are: "
            "recipes side by side, each network judged by the first "
            f"{plan.samples} held-out images. No test image is looked at here. "
            "Certified: by the paper's bound, within the L1 radius that the "
            "network was trained for."
        ),
        units=["as named; standard: images standardised one by one."],
        body=body,
        differences=[
            f"The paper tries {len(paper.RATES)} learning rates, "
            f"{len(paper.NUMBERS)} radii and both kinds of inputs, and chooses "
            "in each cell of a table."
        ],
        rows=rows,
        figure=figures.bars(
            [
                {
                    "title": title,
                    "names": [row["trial"] for row in some],
                    "values": {
                        key: [row[key] for row in some]
                        for key in ("clean", "certified")
                    },
                }
                for title, some in groups.items()
            ],
            "% of held-out images",
            log=False,
        ),
    )


def _title(row) -> str:
    """What is the same for a group of recipes."""
    radius = f" at {row['rho']:g}" if row["rho"] else ""
    return (
        f"{TITLES.get(row['dataset'], row['dataset'])}, "
        f"{row['normalization']}: {row['defence']}{radius}, "
        f"{row['architecture']}"
    )


def _base(recipe) -> str:
    """The recipe that the others differ from."""
    parts = [f"{words.rounds(recipe)} steps", words.optimizer(recipe)]
    if recipe.weight_decay:
        parts.append(f"weight decay {recipe.weight_decay:g}")
    if recipe.defense != "nominal":
        parts.append(f"radius ramped over {words.ramp(recipe)}")
    return f"Base: {', '.join(parts)}."


def _table(rows) -> str:
    """The recipes of a group, the best certified in bold."""
    best = max(row["certified"] for row in rows)
    return tables.to_markdown(
        ["recipe", "clean, %", "certified, %"],
        [
            [
                row["trial"],
                words.cell(row["clean"]),
                words.cell(row["certified"], row["certified"] == best),
            ]
            for row in rows
        ],
    )


def _chance(plan) -> str:
    """How large a difference may be by chance."""
    deviation = 100 * (0.8 * 0.2 / plan.samples) ** 0.5
    return (
        f"One seed each. The standard deviation of 80 % of {plan.samples} "
        f"images is {deviation:.1f} points, less that of a difference between "
        "two networks on the same images: differences of a few tenths decide "
        "nothing. Bold: the best of its group."
    )
