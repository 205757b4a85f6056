"""The page on the speed of training."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import SpeedPlan


def tab_speed(plan: SpeedPlan, rows: list[dict[str, Any]]) -> Page:
    """Batches a second, and the ratio to nominal training.

    Args:
        plan: `SpeedPlan`.
        rows: of `rows.losses.speed`.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['data']}, {row['sets']} set(s)"
        parts.setdefault(title, []).append(row)
    body = []
    for some in parts.values():
        body.append(f"## {some[0]['data']} ({some[0]['sets']} set(s))")
        body.append(_table(some))
    recipe = plan.recipe("RUB")
    return Page(
        name="tab_speed",
        title="Training speed",
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
            f"Batches of {recipe.batch_size}, a {words.network(recipe)} "
            f"network, PGD with {recipe.attack_steps} steps; the compiled "
            "training step alone is timed, on one batch.",
            f"RUB evaluates {recipe.vertices} screened vertices, which gives "
            "the loss of the paper's formula at a fraction of its cost; PGD is "
            "compiled.",
        ],
        rows=rows,
        figure=figures.bars(
            [_group(title, some) for title, some in parts.items()],
            "times the duration of nominal",
            log=True,
        ),
    )


def _group(title, rows):
    return {
        "title": title,
        "names": [row["defence"] for row in rows],
        "values": {
            kind: [row[f"{kind}_nominal_over_defence"] for row in rows]
            for kind in ("paper", "ours")
        },
    }


def _table(rows):
    lines = []
    for row in rows:
        cells = [row["defence"]]
        for kind in ("paper", "ours"):
            rate = row[f"{kind}_batches_per_second"]
            cells += [
                f"{rate:g} ± {row[f'{kind}_deviation']:g}",
                f"{row[f'{kind}_nominal_over_defence']:.1f}",
            ]
        lines.append(cells)
    return tables.to_markdown(
        ["defence", "paper, batches/s", "paper, times nominal",
         "ours, batches/s", "ours, times nominal"],
        lines,
    )  # fmt: skip
