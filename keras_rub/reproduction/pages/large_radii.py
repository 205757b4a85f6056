"""What the paper's figures at large radii mean."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, noise, search, words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import ProtocolPlan
from keras_rub.reproduction.rows.protocol import (
    CEILING,
    FULL,
    NOISE,
    ROUNDED,
    SAMPLING,
    SCALED,
    SEARCH,
    START,
    TRAINED,
    is_beyond,
)

_INPUTS = {
    "standard": "images standardised one by one",
    "unit": "pixels in [0, 1]",
}


def large_radii(plan: ProtocolPlan, rows: list[dict[str, Any]]) -> Page:
    """Ceilings, one classifier with larger logits, and the paper's search.

    Args:
        plan: `ProtocolPlan`.
        rows: of `rows.protocol`.
    """
    body = [
        "Ceilings: samples that an attacker can move to one and the same point "
        "get one class there, so that of such a group only the most frequent "
        "class can be right. Those within the radius of the centre of all "
        "samples are one group; the others are paired with one of another "
        "class at most two radii away, whose midpoint both reach."
    ]
    for name in dict.fromkeys(row["dataset"] for row in rows):
        some = [row for row in rows if row["dataset"] == name]
        body += _of_set(plan, TITLES.get(name, name), some)
    return Page(
        name="large_radii",
        title="What the paper's figures at large radii mean",
        about=(
            "At large radii the paper reports accuracies that our networks do "
            "not reach. Four things say why: what no classifier can exceed; "
            "what the paper's attack says of one and the same classifier when "
            "its logits grow; what the paper's own figures depend on; and what "
            "its search comes to when it is run."
        ),
        units=[_INPUTS[name] + "." for name in plan.normalizations],
        body=body,
        differences=[
            "The search: "
            + "; ".join(map(search.grid_in_words, plan.grids))
            + f". The paper: {paper.IMAGES.steps} steps of "
            f"{paper.IMAGES.small_batch_size} or {paper.IMAGES.batch_size}, "
            f"rates {words.numbers(paper.RATES)}, numbers "
            f"{words.numbers(paper.NUMBERS)}.",
            "As in the paper the rate is constant, the radius is not ramped, "
            "and the network of a cell has the best accuracy on held-out "
            f"images ({plan.validation} here) under foolbox's default attacks. "
            "As in the authors' published code, foolbox keeps pixels in [0, 1] "
            "there and leaves standardised ones free.",
            "The losses are ours, which do not overflow; RUB looks at one "
            f"drawn competitor and {plan.vertices} vertices a sample, PGD "
            f"takes {plan.attack_steps} steps in training.",
        ],
        rows=rows,
        figure=figures.curves(_panels(plan, rows), "accuracy, %", 3),
    )


def _of_set(plan, title, rows) -> list[str]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    parts = [f"## {title}"]
    if CEILING in kinds:
        parts += _ceiling_part(plan, kinds[CEILING])
    if SCALED in kinds:
        parts += _scaled_part(plan, kinds[SCALED], kinds.get(NOISE, []))
    if START in kinds:
        parts += noise.part(
            plan,
            kinds[START],
            kinds.get(SCALED, []),
            kinds.get(CEILING, []),
        )
    if TRAINED in kinds:
        parts += _trained_part(plan, kinds[TRAINED])
    if SEARCH in kinds:
        parts += search.part(kinds[SEARCH])
    if FULL in kinds:
        parts += search.full_part(plan, kinds[FULL], kinds.get(CEILING, []))
    if ROUNDED in kinds:
        parts += search.rounded_part(plan, kinds[ROUNDED])
    return parts


def _ceiling_part(plan, rows) -> list[str]:
    """Where the ceilings are below 100 %, and what they say of the paper."""
    names = plan.normalizations

    def highest(row):
        return max(row[f"ceiling_{name}"] for name in names)

    beyond = [row for row in rows if is_beyond(row["paper"], highest(row))]
    cells = ", ".join(f"L{row['norm']} {row['rho']:g}" for row in beyond)
    return [
        "### What no classifier can exceed",
        f"Over the first {plan.grouped} test images, percent, beside the best "
        "figure of any defence in the paper; radii without a ceiling below "
        "100 % are left out.",
        tables.to_markdown(
            ["norm, rho", "paper's best", *(_INPUTS[name] for name in names)],
            [
                [
                    f"L{row['norm']}, {row['rho']:g}",
                    words.cell(row["paper"], row in beyond),
                    *(words.cell(row[f"ceiling_{name}"]) for name in names),
                ]
                for row in rows
                if min(row[f"ceiling_{name}"] for name in names) < 100
            ],
        ),
        (
            "In bold what is beyond the ceilings of both inputs, by more than "
            f"the {SAMPLING:g} points that other images may make: no network "
            f"has these accuracies, whatever its training ({cells}). The "
            "figure tells what foolbox's attack did not find."
            if beyond
            else "No figure is beyond both ceilings."
        ),
    ]


def _scaled_part(plan, rows, noisy) -> list[str]:
    lines = []
    for title in dict.fromkeys(row["defence"] for row in rows):
        for factor in plan.factors:
            some = [
                row
                for row in rows
                if (row["defence"], row["factor"]) == (title, factor)
            ]
            name = f"{title}, logits times {factor:g}"
            lines.append(
                [
                    f"{name}, paper's attack",
                    *(words.cell(row["ours"]) for row in some),
                    words.cell(some[0]["zero_gradient"]),
                ]
            )
            lines.append(
                [
                    f"{name}, all our attacks",
                    *(words.cell(row["ours_strong"]) for row in some),
                    "",
                ]
            )
        shaken = {
            (row["norm"], row["rho"]): row["ours"]
            for row in noisy
            if row["defence"] == title
        }
        lines.append(
            [
                f"{title}, random noise instead of an attack",
                *(
                    words.cell(shaken.get((row["norm"], row["rho"])))
                    for row in some
                ),
                "",
            ]
        )
    header = [f"L{row['norm']}, {row['rho']:g}" for row in some]
    return [
        "### One classifier, larger logits",
        "A network whose logits are multiplied decides as before: its true "
        "robustness and its certificates are the same. But the cross entropy "
        "of a sample that is far on the right side is 0 in float32, and so is "
        "its gradient; foolbox's attacks then stay where they begin, at the "
        "sample or at a random point. So the accuracy they leave is the "
        "accuracy under random noise, and falls slowly with the radius as "
        "the paper's rows do. Attacks on the ratio of margins are not misled. "
        f"First {plan.samples} test images, standardised, percent; last "
        "column: right samples without any gradient.",
        tables.to_markdown(["", *header, "no gradient"], lines),
        "A search that takes, for each radius, the network with the best "
        "accuracy under this attack prefers such networks to robust ones.",
    ]


def _trained_part(plan, rows) -> list[str]:
    trained = plan.trained[rows[0]["dataset"]]
    recipe = trained.recipes[0]
    return [
        "### Trained for the radius",
        "What adversarial training for such radii comes to, longer than in "
        f"the tables. Steps: {words.rounds(recipe)}, "
        f"{recipe.attack_steps} of the attack; inputs standardised. "
        f"{' '.join([words.ramped(recipe), *words.augmented(recipe)])} A "
        "radius takes the network that any of "
        f"{', '.join(plan.validation_attacks)} breaks least on "
        f"{plan.validation} held-out images, seed by seed; first "
        f"{plan.samples} test images. "
        f"{trained.about}".strip(),
        tables.to_markdown(
            ["norm, rho", "paper's best", "ours, paper's attack",
             "ours, all our attacks", "clean", "network", "seed"],
            [
                [
                    f"L{row['norm']}, {row['rho']:g}",
                    words.cell(row["paper"]),
                    words.cell(row["ours"]),
                    words.cell(row["ours_strong"]),
                    words.cell(row["clean"]),
                    f"{row['defence']}, {row['number']:g}",
                    str(row["seed"]),
                ]
                for row in rows
            ],
        ),
    ]  # fmt: skip


def _panels(plan, rows) -> list[dict[str, Any]]:
    """A panel a data set by noise, then one a data set and norm."""
    found = []
    for name in plan.bounded:
        starts = [
            row
            for row in rows
            if (row["dataset"], row["kind"]) == (name, START)
        ]
        found += noise.panels(name, starts)
    for name in plan.datasets:
        for norm, radii in plan.radii.items():
            some = [
                row
                for row in rows
                if (row["dataset"], row["norm"]) == (name, str(norm))
                and row["rho"] in radii
            ]
            found.append(
                {
                    "title": f"{TITLES.get(name, name)}, L{norm}",
                    "radii": radii,
                    "xlabel": f"L{norm} radius rho, in the network's input "
                    "units",
                    "lines": _lines(plan, some, radii),
                }
            )
    return found


def _lines(plan, rows, radii) -> list[dict[str, Any]]:
    """The paper's best, ceilings, and one network with larger logits."""
    ceilings = zip(plan.normalizations, ("#c0392b", "#e67e22"), strict=False)
    wanted: list[tuple[Any, ...]] = [
        ("paper's best", CEILING, "paper", {}, "0.3", ":", "s"),
        *(
            (f"no classifier above, {name}", CEILING, f"ceiling_{name}", {},
             colour, "--", None)
            for name, colour in ceilings
        ),
    ]  # fmt: skip
    if plan.scaled:
        title = plan.scaled[0][0]
        plain, large = (
            {"defence": title, "factor": factor}
            for factor in (plan.factors[0], plan.factors[-1])
        )
        wanted += [
            (f"{title}, logits x {plain['factor']:g}, paper's attack",
             SCALED, "ours", plain, "#85c1e9", "-", "o"),
            (f"{title}, logits x {large['factor']:g}, paper's attack",
             SCALED, "ours", large, "#1f6f8b", "-", "o"),
            (f"{title}, logits x {large['factor']:g}, all our attacks",
             SCALED, "ours_strong", large, "#8e44ad", "-", "X"),
            (f"{title}, random noise",
             NOISE, "ours", {"defence": title}, "#16a085", "-.", "^"),
        ]  # fmt: skip
    return [_line(rows, radii, *how) for how in wanted]


def _line(rows, radii, label, kind, key, which, colour, style, marker):
    """One of the lines of `_lines`: the rows of a kind that fit `which`."""
    values = {
        row["rho"]: row.get(key)
        for row in rows
        if row["kind"] == kind and which.items() <= row.items()
    }
    return {
        "values": [values.get(rho) for rho in radii],
        "label": label,
        "color": colour,
        "ls": style,
        "marker": marker,
        "ms": 5,
        "lw": 1.6,
    }
