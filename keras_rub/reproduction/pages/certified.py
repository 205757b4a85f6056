"""Pages on certified accuracy of images."""

from __future__ import annotations

import textwrap
from typing import Any

from keras_rub import tables
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import ImagePlan
from keras_rub.reproduction.rows.images import best_of

_WIDTH = 45  # of the title of a panel, in letters


def tab_bounds(
    name: str,
    dataset: str,
    plan: ImagePlan,
    rows: list[dict[str, Any]],
    theirs: dict[str, dict[float, float]],
    *,
    units: list[str],
    ready: str,
    laptop: bool,
) -> Page:
    """Certified accuracies of one image set.

    Args:
        name: of the page.
        dataset: the paper's name of the set.
        plan: `ImagePlan`.
        rows: of `rows.images.certified`.
        theirs: the paper's table, as of `paper.table`.
        units: of `rows.images.units`.
        ready: how many networks are ready, such as `"3 of 4"`.
        laptop: whether this is the laptop budget, of which is told how it
            came about.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(_kind(row, plan), []).append(row)
    radii = sorted({row["rho"] for row in rows})
    body = [
        f"{ready} networks are ready. Each radius takes the network that was "
        "trained for the smallest radius not below it, or for the largest of "
        "all.",
    ]
    for kind, some in kinds.items():
        body += [
            f"## {kind[0].upper()}{kind[1:]}",
            _table(some, theirs, radii),
            _verdict(some, plan.tried),
            *_over_seeds(some),
        ]
    return Page(
        name=name,
        title=f"{TITLES[dataset]}: certified accuracy, L1",
        about=(
            "Percent of test images that are classified right and proved to "
            f"stay so within an L1 ball; the first {rows[0]['samples']} test "
            f"images{'' if plan.conv is None else ', unless said otherwise'}."
        ),
        units=units,
        body=body,
        differences=_differences(plan, laptop),
        rows=rows,
        figure=figures.curves(
            [
                _panel(_first(some), theirs, textwrap.fill(kind, _WIDTH))
                for kind, some in kinds.items()
            ],
            "certified accuracy, %",
            3,
        ),
    )


def _kind(row, plan) -> str:
    """What a table of the page is about."""
    if plan.conv is not None and row["architecture"] == plan.conv.architecture:
        return (
            f"inputs: {row['normalization']}, convolutional network "
            f"({row['architecture']}), first {row['samples']} images"
        )
    return f"inputs: {row['normalization']}"


def _first(rows):
    """Those of the first seed."""
    return [row for row in rows if row["seed"] == rows[0]["seed"]]


def _over_seeds(rows) -> list[str]:
    """How much the seed matters, if there are several."""
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    if len(seeds) < 2:
        return []
    most = max(max(found) - min(found) for found in _best(rows).values())
    return [
        f"Seeds {words.numbers(seeds)}: our best bounds differ by at most "
        f"{most:.2f} points at any radius."
    ]


def _best(rows) -> dict[float, list[float]]:
    """From the radius to our best figures, one of each seed."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row["rho"], []).append(best_of(row))
    return found


def _differences(plan, laptop):
    found = [
        "The paper chooses between both kinds of inputs cell by cell, at "
        "the same rho, and does not say which it took; compare it with "
        "the standardised table, where rho is a smaller change of pixels.",
    ]
    if plan.most_open is not None:
        found.append(
            "`auto` is not run (a dash) where the paper's bound leaves more "
            f"than {plan.most_open} images open."
        )
    found += [
        "The paper's figures are samples of batches and count a tie as "
        "robust; ours take every image and a strict inequality with an "
        "allowance for rounding. They are multiples of "
        f"1/{paper.SAMPLES}, so it looked at so many images, and does not say "
        f"which; our row of the first {paper.SAMPLES} shows how far a part of "
        "the test set can be from the whole.",
        f"Training: {plan.rub.steps} steps of {plan.rub.batch_size} "
        f"({plan.rub_small.steps} for radii up to {plan.small:g}), radius "
        f"ramped over {words.ramp(plan.rub)}, weight decay "
        f"{plan.rub.weight_decay:g}, {words.optimizer(plan.rub)}; the paper: "
        f"{paper.IMAGES.steps} steps, no ramp.",
        *words.augmented_rub(plan),
    ]
    if plan.conv is not None:
        found += [
            f"Convolutional networks: {plan.conv.steps} steps of "
            f"{plan.conv.batch_size}, weight decay "
            f"{plan.conv.weight_decay:g}, {words.optimizer(plan.conv)}. The "
            "paper has none in this table.",
            *words.augmented(plan.conv, "Training images of these"),
        ]
    if laptop:
        found.append(
            "That small radii have a recipe of their own, the rule that gives "
            "a radius its network, and the use of the whole test set were "
            "settled with results on test images in view; gains of a few "
            "tenths of a percent mean little."
        )
    return found


def _table(rows, theirs, radii):
    lines = [
        [f"{defence}, paper", *(words.cell(row.get(r)) for r in radii)]
        for defence, row in theirs.items()
    ]
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    for seed in seeds:
        lines += _of_seed(
            [row for row in rows if row["seed"] == seed],
            radii,
            f", seed {seed}" if len(seeds) > 1 else "",
        )
    return tables.to_markdown(["rho", *(f"{rho:g}" for rho in radii)], lines)


def _of_seed(rows, radii, ending):
    """Lines of the table about the networks of one seed."""
    by_radius = {row["rho"]: row for row in rows}
    found = [by_radius.get(rho) for rho in radii]
    lines = []
    for key, title in (
        ("ours_rub", "RUB, ours, the paper's bound"),
        ("ours_auto", "RUB, ours, `auto`"),
        ("ours_auto_range", "RUB, ours, `auto`, valid range"),
    ):
        if any(row is not None and row[key] is not None for row in found):
            cells = [_cell(row, key) for row in found]
            lines.append([title + ending, *cells])
    if rows[0]["ours_first"] is not None:
        cells = [
            words.cell(None if row is None else row["ours_first"])
            for row in found
        ]
        title = f"our best bound, first {paper.SAMPLES} images only"
        lines.append([title + ending, *cells])
    shares = [words.cell(row and _share(row)) for row in found]
    lines.append(["our error, share of the paper's" + ending, *shares])
    trained = [f"{row['training_rho']:g}" if row else "-" for row in found]
    lines.append(["training radius of ours" + ending, *trained])
    return lines


def _share(row) -> float:
    """What we leave unproved, as a share of what the paper does."""
    return (100 - best_of(row)) / (100 - row["paper_rub"])


def _cell(row, key) -> str:
    """Our figure, bold where it is at least the paper's."""
    if row is None or row[key] is None:
        return words.cell(None)
    return words.cell(row[key], row[key] >= row["paper_rub"])


def _verdict(rows, tried):
    """Where we fall short; of several seeds the worst counts."""
    theirs = {row["rho"]: row["paper_rub"] for row in rows}
    gains = {rho: min(ours) - theirs[rho] for rho, ours in _best(rows).items()}
    short = [
        f"{rho:g} ({gain:+.2f})"
        for rho, gain in sorted(gains.items())
        if gain < 0
    ]
    if not short:
        return "Ours is at least the paper's RUB row at every radius (bold)."
    return (
        "Bold: at least the paper's RUB row. We fall short of it at rho = "
        f"{', '.join(short)}. {tried}"
    ).strip()


def _panel(rows, theirs, title):
    ours = [
        {
            "values": [row[key] for row in rows],
            "label": label,
            "color": colour,
            "marker": marker,
            "ms": 4,
            "ls": style,
        }
        for key, label, colour, marker, style in (
            ("ours_rub", "ours, the paper's bound", "#c0392b", "o", "-"),
            ("ours_auto", "ours, auto", "#1f6f8b", "D", "--"),
            ("ours_auto_range", "ours, auto, valid range", "#16a085", "^",
             "-."),
        )
    ]  # fmt: skip
    papers = [
        {
            "values": [theirs[defence][row["rho"]] for row in rows],
            "label": f"{defence}, paper",
            "color": colour,
            "marker": "s",
            "ms": 3,
            "ls": ":",
        }
        for defence, colour in (
            ("RUB", "0.2"),
            ("aRUB-L1", "0.45"),
            ("PGD-Linf", "0.65"),
        )
    ]
    return {
        "title": title,
        "radii": [row["rho"] for row in rows],
        "xlabel": "L1 radius rho, in the network's input units",
        "lines": ours + papers,
    }
