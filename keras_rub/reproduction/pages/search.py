"""What the paper's search comes to, and what it is worth."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction.pages import words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.plans import Grid, ProtocolPlan
from keras_rub.reproduction.rows.protocol import SAMPLING


def part(rows: list[dict[str, Any]]) -> list[str]:
    """The network that the search takes for each cell.

    Args:
        rows: of `rows.protocol.search`, of one data set.
    """
    return [
        "### The search, run",
        f"Of the {rows[0]['networks']} networks of the search (listed at the "
        "end), the one with the best accuracy on held-out images under the "
        "paper's attack, for each radius; its figures are of test images. No "
        "gradient: share of the right samples whose cross entropy has none in "
        "float32.",
        tables.to_markdown(
            ["norm, rho", "paper's best", "ours, paper's attack",
             "ours, all our attacks", "clean", "no gradient", "network"],
            [
                [
                    f"L{row['norm']}, {row['rho']:g}",
                    words.cell(row["paper"]),
                    words.cell(row["ours"]),
                    words.cell(row["ours_strong"]),
                    words.cell(row["clean"]),
                    words.cell(row["zero_gradient"]),
                    _network(row),
                ]
                for row in rows
            ],
        ),
        verdict(rows),
    ]  # fmt: skip


def _network(row) -> str:
    """How a network of the search was trained."""
    number = f", number {row['number']:g}" if row["number"] else ""
    return (
        f"{row['defence']}, {row['normalization']}{number}, rate "
        f"{row['rate']:g}, {row['steps']} steps of {row['batch_size']}"
        + (f", seed {row['seed']}" if row["seed"] else "")
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the search says of the paper's figures.

    Args:
        rows: of `rows.protocol.search`.
    """
    reached = [
        row
        for row in rows
        if row["paper"] is not None and row["ours"] >= row["paper"] - SAMPLING
    ]
    fallen = max(row["ours"] - row["ours_strong"] for row in rows)
    text = (
        f"In {len(reached)} of {len(rows)} cells the search comes to the "
        f"paper's best figure or within {SAMPLING:g} points of it. All our "
        f"attacks take up to {fallen:.1f} points off what the paper's attack "
        "leaves."
    )
    stubborn = sum(row["ours_strong"] == row["clean"] for row in rows)
    if stubborn:
        text += (
            f" In {stubborn} cells it ends at a network that no attack changes "
            "because it always says the same class."
        )
    return text


def full_part(
    plan: ProtocolPlan,
    rows: list[dict[str, Any]],
    bests: list[dict[str, Any]],
) -> list[str]:
    """Networks trained as long as the paper's, defence by defence.

    Args:
        plan: `ProtocolPlan`.
        rows: of `rows.protocol.full_length`, of one data set.
        bests: with the paper's best figures, of `rows.protocol.ceilings`.
    """
    places = [(str(n), rho) for n, radii in plan.radii.items() for rho in radii]

    def line(name, some, key, ending=""):
        values = {(row["norm"], row["rho"]): row[key] for row in some}
        percents = [words.cell(values.get(place)) for place in places]
        return [name, *percents, ending]

    def distance(some):
        both = [row for row in some if row["paper"] is not None]
        gaps = [abs(row["ours"] - row["paper"]) for row in both]
        return f"{sum(gaps) / len(gaps):.1f}" if gaps else ""

    lines = [line("best of all defences, paper", bests, "paper")]
    for title in dict.fromkeys(row["defence"] for row in rows):
        of_title = [row for row in rows if row["defence"] == title]
        lines.append(line(f"{title}, paper", of_title, "paper"))
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in of_title:
            name = f"{title}, ours, batches of {row['batch_size']}"
            name += f", seed {row['seed']}" if row["seed"] else ""
            groups.setdefault(name, []).append(row)
        lines += [
            line(name, some, "ours", distance(some))
            for name, some in groups.items()
        ]
    return [
        "### The paper's training, with and without a defence",
        f"Networks of {rows[0]['steps']} steps as in the paper, the best over "
        "inputs and rates at each radius, on "
        f"{plan.validation} held-out images under the paper's attack, percent. "
        "Last column: mean distance from the paper's row of that defence.",
        tables.to_markdown(
            ["", *(f"L{norm}, {rho:g}" for norm, rho in places), "distance"],
            lines,
        ),
        *conclusion(rows, bests),
    ]


def rounded_part(plan: ProtocolPlan, rows: list[dict[str, Any]]) -> list[str]:
    """Why the attack fails: the cross entropy is rounded.

    Args:
        plan: `ProtocolPlan`.
        rows: of `rows.protocol.rounded`, of one data set.
    """
    places = [(str(n), rho) for n, radii in plan.radii.items() for rho in radii]
    lines = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        some = [row for row in rows if row["seed"] == seed]
        for key, title in (
            ("ours", "cross entropy"), ("ours_log_odds", "log odds"),
        ):  # fmt: skip
            values = {(row["norm"], row["rho"]): row[key] for row in some}
            lines.append(
                [
                    f"PGD on the {title}, seed {seed}",
                    *(words.cell(values.get(place)) for place in places),
                    words.cell(some[0]["certain"]),
                    words.cell(some[0]["clean"]),
                ]
            )
    return [
        "### Why the attack fails",
        "The gradient of the cross entropy by the logit of the own class is "
        "its probability less 1. In float32 that probability is 1 as soon as "
        "the own logit is about 17 above the others; then the attack no longer "
        "sees what would lower the own logit, and only raises the others, "
        "which in such a network raises the own one too. The log odds of the "
        "other classes, of which the cross entropy is the softplus, have a "
        "gradient of the same direction and no such rounding: on them PGD is "
        "the same attack in all but that. Networks without defence, rate 0.01, "
        f"{plan.rounded[0].steps} steps of "
        f"{plan.rounded[0].batch_sizes[0]}, first {plan.samples} test images, "
        "percent:",
        tables.to_markdown(
            ["", *(f"L{norm}, {rho:g}" for norm, rho in places),
             "probability 1", "clean"],
            lines,
        ),
        '"Probability 1" is the share of the right samples whose own class has '
        "probability 1 in float32. What PGD on the cross entropy leaves "
        "standing is about that share.",
    ]  # fmt: skip


def conclusion(
    rows: list[dict[str, Any]], bests: list[dict[str, Any]]
) -> list[str]:
    """What networks without defence say of the paper's figures.

    Args:
        rows: of `rows.protocol.full_length`.
        bests: with the paper's best figures, of `rows.protocol.ceilings`.
    """
    wanted = {
        (row["norm"], row["rho"]): row["paper"]
        for row in bests
        if row["paper"] is not None
    }
    ours: dict[tuple[str, float], float] = {}
    for row in rows:
        place = (row["norm"], row["rho"])
        if row["defence"] == "Nominal" and place in wanted:
            ours[place] = max(row["ours"], ours.get(place, 0.0))
    reached = [p for p, best in ours.items() if best >= wanted[p] - SAMPLING]
    if not reached:
        return []
    cells = ", ".join(f"L{norm} {rho:g}" for norm, rho in reached)
    return [
        f"In {len(reached)} of {len(ours)} cells ({cells}) a network without "
        "any defence has the paper's best figure, or is within "
        f"{SAMPLING:g} points of it. The authors' published notebook "
        "(kimvc7/Robustness, notebooks/Vision.ipynb) takes the row Nominal "
        "from networks trained with batches of 32 only, those of the other "
        "defences from batches of 32 and of 256. plots.ipynb there, of an "
        "earlier run with batches of 32, names what was chosen for RUB on "
        "MNIST at Linf 0.5 and 1: standardised inputs, rate 0.01 and number "
        "0.01, which is hardly a defence.",
    ]


def grid_in_words(grid: Grid) -> str:
    """Which networks a grid holds."""
    numbers = f", numbers {words.numbers(grid.numbers)}" if grid.numbers else ""
    batches = " or ".join(map(str, grid.batch_sizes))
    sets = " and ".join(TITLES.get(name, name) for name in grid.datasets)
    return (
        f"on {sets} {', '.join(grid.defences)} "
        f"({', '.join(grid.normalizations)}), "
        f"{grid.steps} steps of {batches}, rates "
        f"{words.numbers(grid.rates)}{numbers}"
        + (f", seeds {words.numbers(grid.seeds)}" if grid.seeds != (0,) else "")
    )
