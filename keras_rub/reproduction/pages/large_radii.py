"""What the paper's figures at large radii mean."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import Grid, ProtocolPlan
from keras_rub.reproduction.rows.protocol import (
    CEILING,
    FULL,
    NOISE,
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

# From here on the noise of a random start moves pixels visibly, and starts of
# different norms count as alike if they differ by less than the ratio.
_NOTICEABLE = 0.15
_ALIKE = 1.25
_CLOSE = 3.0  # percentage points between such starts

_SECOND_LOOK = (
    " These recipes were settled after shorter trainings for Linf 0.3, 0.5 and "
    "1 had been seen on the same test images: this table had a second look at "
    "them."
)


def large_radii(
    plan: ProtocolPlan, rows: list[dict[str, Any]], laptop: bool
) -> Page:
    """Ceilings, one classifier with larger logits, and the paper's search.

    Args:
        plan: `ProtocolPlan`.
        rows: of `rows.protocol`.
        laptop: whether it is the run whose history the page has to tell.
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
        body += _of_set(plan, TITLES.get(name, name), some, laptop)
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
            + "; ".join(map(_grid, plan.grids))
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


def _grid(grid: Grid) -> str:
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


def _of_set(plan, title, rows, laptop) -> list[str]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    parts = [f"## {title}"]
    if CEILING in kinds:
        parts += _ceiling_part(plan, kinds[CEILING])
    if SCALED in kinds:
        parts += _scaled_part(plan, kinds[SCALED], kinds.get(NOISE, []))
    if START in kinds:
        parts += _start_part(plan, kinds[START], kinds.get(SCALED, []))
    if TRAINED in kinds:
        parts += _trained_part(plan, kinds[TRAINED], laptop)
    if SEARCH in kinds:
        parts += _search_part(kinds[SEARCH])
    if FULL in kinds:
        parts += _full_part(plan, kinds[FULL], kinds.get(CEILING, []))
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


def _scaled_part(plan, rows, noise) -> list[str]:
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
            for row in noise
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


def by_noise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of one defence where a random start is noticeable.

    Args:
        rows: of `rows.protocol.starts`, of one defence.

    Returns:
        The rows, by growing noise.
    """
    some = [row for row in rows if row["start_noise"] >= _NOTICEABLE]
    return sorted(some, key=lambda row: row["start_noise"])


def norm_gap(rows: list[dict[str, Any]]) -> float | None:
    """How much accuracies differ between norms where the noise is alike.

    Args:
        rows: of one defence, with `norm`, `start_noise` and the accuracy
            `paper`.

    Returns:
        The largest difference, `None` if no two norms have starts alike.
    """
    gaps = [
        abs(one["paper"] - other["paper"])
        for one in rows
        for other in rows
        if one["norm"] != other["norm"]
        and 1 <= other["start_noise"] / one["start_noise"] < _ALIKE
    ]
    return max(gaps, default=None)


def _start_part(plan, rows, scaled) -> list[str]:
    """The paper's figures by the noise that its PGD begins with."""
    lines = _by_defence(rows)
    gaps = {
        title: gap
        for title, some in lines.items()
        if (gap := norm_gap(some)) is not None
    }
    if not gaps:
        return []
    noise = {
        (row["norm"], row["rho"]): row["start_noise"]
        for row in next(iter(lines.values()))
    }
    table = {f"{title}, paper": some for title, some in lines.items()}
    table |= _scaled_by_noise(plan, scaled, noise)

    def line(name, some):
        values = {(row["norm"], row["rho"]): row["paper"] for row in some}
        percents = [words.cell(values.get(place)) for place in noise]
        return [name, *percents, f"{norm_gap(some):.1f}"]

    close = [title for title, gap in gaps.items() if gap < _CLOSE]
    return [
        "### What the paper's figures depend on",
        "foolbox's PGD begins at a random point of the ball. If it finds no "
        "gradient it stays there, and the accuracy it leaves depends on how "
        "far that point is from the image, and on nothing else: on the "
        "standard deviation of a pixel, which is rho times 0.58 for Linf, "
        "about rho over the root of the number of pixels for L2, and 1.4 rho "
        "over that number for L1. To an attack that sees gradients the three "
        "balls are not alike at all. The figures by that deviation, percent:",
        tables.to_markdown(
            ["deviation", *(f"{value:.2f}" for value in noise.values()),
             "between norms"],
            [
                ["norm, rho", *(f"L{n}, {rho:g}" for n, rho in noise), ""],
                *(line(*pair) for pair in table.items()),
            ],
        ),
        "The last column is the largest difference between two norms whose "
        f"deviations are within a factor of {_ALIKE:g}."
        + (
            f" In the paper's rows {', '.join(close)} it is below {_CLOSE:g} "
            "points: these figures are what some network keeps under random "
            "noise, whatever the norm."
            if close
            else ""
        ),
    ]  # fmt: skip


def _by_defence(starts) -> dict[str, list[dict[str, Any]]]:
    starts = list(starts)
    return {
        title: by_noise([row for row in starts if row["defence"] == title])
        for title in dict.fromkeys(row["defence"] for row in starts)
    }


def _scaled_by_noise(plan, scaled, noise) -> dict[str, list[dict[str, Any]]]:
    """Our networks with and without gradients, as rows of `norm_gap`."""
    titles = list(dict.fromkeys(row["defence"] for row in scaled))
    plain, large = plan.factors[0], plan.factors[-1]
    wanted = [(title, large, "ours", "paper's attack") for title in titles]
    wanted += [
        (title, plain, key, attack)
        for title in titles[:1]
        for key, attack in (
            ("ours", "paper's attack"), ("ours_strong", "all our attacks"),
        )
    ]  # fmt: skip
    return {
        f"{title}, ours, logits times {factor:g}, {attack}": [
            {**row, "paper": row[key], "start_noise": noise[place]}
            for row in scaled
            if (row["defence"], row["factor"]) == (title, factor)
            and (place := (row["norm"], row["rho"])) in noise
        ]
        for title, factor, key, attack in wanted
    }


def _trained_part(plan, rows, laptop) -> list[str]:
    recipe = plan.trained[0]
    return [
        "### Trained for the radius",
        "Where a radius leaves room for robustness, adversarial training for "
        f"that radius finds it. Steps: {words.rounds(recipe)}, "
        f"{recipe.attack_steps} of the attack; inputs standardised. "
        f"{words.ramped(recipe)} A radius takes the network that any of "
        f"{', '.join(plan.validation_attacks)} breaks least on "
        f"{plan.validation} held-out images."
        + (_SECOND_LOOK if laptop else ""),
        tables.to_markdown(
            ["norm, rho", "paper's best", "ours, paper's attack",
             "ours, all our attacks", "clean", "network"],
            [
                [
                    f"L{row['norm']}, {row['rho']:g}",
                    words.cell(row["paper"]),
                    words.cell(row["ours"]),
                    words.cell(row["ours_strong"]),
                    words.cell(row["clean"]),
                    f"{row['defence']}, {row['number']:g}",
                ]
                for row in rows
            ],
        ),
    ]  # fmt: skip


def _search_part(rows) -> list[str]:
    return [
        "### The search, run",
        f"Of {rows[0]['networks']} networks of all defences, inputs, rates and "
        "numbers, the one with the best accuracy on held-out images under the "
        "paper's attack, for each radius; its figures are of test images. No "
        "gradient: share of the right samples whose cross entropy has none in "
        "float32, at the image and at the random point where PGD begins (for "
        "L2 none above 1e-12, below which foolbox does not lengthen it).",
        tables.to_markdown(
            ["norm, rho", "paper's best", "ours, paper's attack",
             "ours, all our attacks", "clean", "no gradient",
             "no gradient at the start", "network"],
            [
                [
                    f"L{row['norm']}, {row['rho']:g}",
                    words.cell(row["paper"]),
                    words.cell(row["ours"]),
                    words.cell(row["ours_strong"]),
                    words.cell(row["clean"]),
                    words.cell(row["zero_gradient"]),
                    words.cell(row["blind"]),
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


def _full_part(plan, rows, bests) -> list[str]:
    """Networks trained as long as the paper's, defence by defence."""
    places = [(str(n), rho) for n, radii in plan.radii.items() for rho in radii]

    def line(name, some, key):
        values = {(row["norm"], row["rho"]): row[key] for row in some}
        return [name, *(words.cell(values.get(place)) for place in places)]

    lines = [line("best of all defences, paper", bests, "paper")]
    for title in dict.fromkeys(row["defence"] for row in rows):
        of_title = [row for row in rows if row["defence"] == title]
        lines.append(line(f"{title}, paper", of_title, "paper"))
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in of_title:
            name = f"{title}, ours, batches of {row['batch_size']}"
            name += f", seed {row['seed']}" if row["seed"] else ""
            groups.setdefault(name, []).append(row)
        lines += [line(name, some, "ours") for name, some in groups.items()]
    return [
        "### The paper's training, with and without a defence",
        f"Networks of {rows[0]['steps']} steps as in the paper, the best over "
        "inputs and rates (of those of the search, below) at each radius, on "
        f"{plan.validation} held-out images under the paper's attack, percent:",
        tables.to_markdown(
            ["", *(f"L{norm}, {rho:g}" for norm, rho in places)], lines
        ),
        *conclusion(rows, bests),
    ]


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
    blind = max(row["blind"] or row["zero_gradient"] for row in rows)
    if reached or blind:
        fallen = max(row["ours"] - row["ours_strong"] for row in rows)
        return (
            f"In {len(reached)} of {len(rows)} cells the search comes to the "
            f"paper's figure or within {SAMPLING:g} points of it. All our "
            f"attacks take up to {fallen:.1f} points off what the paper's "
            f"attack leaves; up to {blind:g} % of the right samples of a "
            "chosen network have no gradient where that attack begins."
        )
    stubborn = sum(row["ours_strong"] == row["clean"] for row in rows)
    return (
        "The paper's figures do not come out, and none of the chosen networks "
        f"lacks gradients. In {stubborn} cells the search ends at a network "
        "that no attack changes because it always says the same class."
    )


def _panels(plan, rows) -> list[dict[str, Any]]:
    """A panel a data set by noise, then one a data set and norm."""
    found = []
    for name in plan.bounded:
        lines = _by_defence(
            row
            for row in rows
            if (row["dataset"], row["kind"]) == (name, START)
        )
        if any(norm_gap(some) is not None for some in lines.values()):
            found.append(_noise_panel(name, lines))
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


def _noise_panel(name, lines) -> dict[str, Any]:
    """The paper's figures over the noise that PGD begins with."""
    cells = next(iter(lines.values()))
    return {
        "title": f"{TITLES.get(name, name)}, the paper's figures by noise",
        "radii": [row["start_noise"] for row in cells],
        "ticks": [
            f"{row['start_noise']:.2f}\nL{row['norm']}\n{row['rho']:g}"
            for row in cells
        ],
        "xlabel": "deviation of a pixel where PGD begins; norm and radius",
        "lines": [
            figures.line(title, [row["paper"] for row in some], True)
            for title, some in lines.items()
        ],
    }


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
