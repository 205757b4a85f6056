"""Pages on images under attack."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.attacks.suite import names_of
from keras_rub.reproduction import paper
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.plans import MASKED, MASKED_FACTOR, ImagePlan
from keras_rub.reproduction.rows.images import Erasure

TITLES = {
    "fashion_mnist": "Fashion-MNIST",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
}


def tab_attacked(
    name: str,
    dataset: str,
    cnn: bool,
    plan: ImagePlan,
    rows: list[dict[str, Any]],
    *,
    units: list[str],
    ready: str,
    erasure: Erasure,
) -> Page:
    """Attacked accuracies of one image set.

    Args:
        name: of the page.
        dataset: the paper's name of the set.
        cnn: whether the networks are convolutional.
        plan: `ImagePlan`.
        rows: of `rows.images.attacked`.
        units: of `rows.images.units`.
        ready: how many networks are ready, such as `"3 of 5"`.
        erasure: of `rows.images.erasure`.
    """
    part = plan.attack_of(cnn)
    kind = "(PGD)" if cnn else "(smaller of PGD and FGM)"
    by_norm: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["seed"]:
            by_norm.setdefault(row["norm"], []).append(row)
    return Page(
        name=name,
        title=f"{TITLES[dataset]}{', CNN' if cnn else ''}: "
        "accuracy under attack",
        about=(
            f"The first {part.samples} test images. Where a defence has "
            "several networks (inputs, training radius), each norm and radius "
            f"takes the one with the best accuracy on {part.validation} "
            "held-out images under the paper's attacks; the CSV names it."
        ),
        units=units,
        body=[
            f"{ready} networks are ready.",
            *_erased(erasure),
            *_masked(rows),
            f"## The paper's attacks {kind}",
            *_tables(by_norm, "ours"),
            "## All our attacks\n\n"
            f"Any of {', '.join(names_of(part.attacks))} may win.",
            *_tables(by_norm, "ours_strong"),
            *again(rows),
        ],
        differences=_differences(plan, cnn),
        rows=rows,
        figure=figures.curves(
            [_panel(norm, some) for norm, some in by_norm.items()],
            "attacked accuracy, %",
            4,
        ),
    )


def _erased(erasure):
    """Says at which radii no network can do better than a constant."""
    if not erasure.radii:
        return []
    found = ", ".join(
        f"L{norm} at {rho:g} and more" for norm, rho in erasure.radii.items()
    )
    return [
        f"Within some of these radii ({found}) every test image can "
        "be turned into the same one, the origin. There no network can keep "
        "more than the share of the most frequent class, "
        f"{100 * erasure.most:.2f} % of the whole test set; figures well above "
        "that, the paper's or ours, show the limits of an attack, not "
        "robustness."
    ]


def _masked(rows):
    """Says what the last row of each table is for."""
    if not any(row["defence"] == MASKED for row in rows):
        return []
    return [
        f'"{MASKED}" is the nominal network with its logits times '
        f"{MASKED_FACTOR}. That changes no class, but leaves the cross entropy "
        "of nearly all samples without a gradient: what it keeps under the "
        "paper's attacks and not under ours is what these attacks can't see."
    ]


def again(rows: list[dict[str, Any]]) -> list[str]:
    """The best networks beside those of other seeds.

    Args:
        rows: of `rows.images.attacked`.
    """
    others = [row for row in rows if row["seed"]]
    if not others:
        return []
    first = {
        (row["norm"], row["defence"], row["rho"]): row
        for row in rows
        if not row["seed"]
    }
    lines = [
        [
            f"L{row['norm']}, {row['rho']:g}",
            f"{row['defence']}, {row['training_rho']:g}",
            row["seed"],
            *(
                words.cell(some[key])
                for key in ("ours", "ours_strong")
                for some in (
                    first[row["norm"], row["defence"], row["rho"]],
                    row,
                )
            ),
        ]
        for row in others
    ]
    return [
        "## Other seeds\n\n"
        "Where a network is the best of all ours at a norm and radius under "
        "the paper's attacks: the same recipe with other weights and batches. "
        "Nothing was chosen by their figures. In the [summary](summary.md) "
        "the mean of the seeds counts; what is not listed has one seed.",
        tables.to_markdown(
            ["norm, rho", "network", "seed", "paper's attack, seed 0",
             "this seed", "all our attacks, seed 0", "this seed"],
            lines,
        ),
    ]  # fmt: skip


def _differences(plan, cnn):
    part = plan.attack_of(cnn)
    inputs = plan.inputs_of(cnn)
    if len(inputs) > 1:
        found = (
            "Like the paper, a cell takes the better of the two input "
            "normalisations at the same rho, though rho means different "
            "things to them."
        )
    else:
        found = f"Inputs are {inputs[0]} only; the paper takes the better."
        if plan.unit_radii and not cnn:
            found += " RUB is trained for pixels in [0, 1], too."
    others = f"RUB {words.rounds(part.rub)}"
    if part.coap is not None:
        others += f", COAP {words.rounds(part.coap)}"
    if part.pgd is not None:
        others += f", PGD {words.rounds(part.pgd)}"
    theirs = paper.IMAGES
    return [
        found + " Attacks are not held to the valid range.",
        f"Steps: {words.rounds(part.recipe)} ({others}); the paper: "
        f"{theirs.steps} of {theirs.small_batch_size} or {theirs.batch_size}, "
        f"{len(paper.RATES)} learning rates. Where training is that short even "
        "the nominal network can be behind the paper's: compare our rows with "
        "each other then.",
        f"Training radii: {words.numbers(part.numbers)}, times the square root "
        f"of the number of features for L1; the paper: {len(paper.NUMBERS)} "
        f"such numbers, up to {max(paper.NUMBERS):g}.",
        words.ramped(part.recipe),
        *(words.augmented(part.recipe) if cnn else _augmented(plan)),
        *(["The paper leaves RUB out of its CNN tables."] if cnn else []),
    ]


def _augmented(plan):
    """What is done to the training images of perceptrons."""
    every = [
        words.augmented(recipe)
        for recipe in (plan.other, plan.rub, plan.rub_small)
    ]
    if every[0] == every[1] == every[2]:
        return every[0]
    others = "Training images of all but RUB networks"
    return words.augmented(plan.other, others) + words.augmented_rub(plan)


def _tables(by_norm, key):
    """A line and a table for each norm."""
    parts = []
    for norm, rows in by_norm.items():
        parts += [f"L{norm}, percent:", _table(rows, key)]
    return parts


def _table(rows, key):
    radii = _radii(rows)
    lines = []
    for defence, cells in _by_defence(rows).items():
        theirs = _values(cells, radii, "paper")
        if key == "ours" and any(value is not None for value in theirs):
            lines.append([f"{defence}, paper", *map(words.cell, theirs)])
        ours = _values(cells, radii, key)
        lines.append([f"{defence}, ours", *map(words.cell, ours)])
    return tables.to_markdown(["rho", *(f"{rho:g}" for rho in radii)], lines)


def _values(cells, radii, key) -> list[float | None]:
    return [cells[rho][key] if rho in cells else None for rho in radii]


def _radii(rows):
    return sorted({row["rho"] for row in rows})


def _by_defence(rows) -> dict[str, dict[float, dict[str, Any]]]:
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["defence"], {})[row["rho"]] = row
    return found


def _panel(norm, rows):
    radii = _radii(rows)
    lines = []
    for kind in ("ours", "paper"):
        for defence, cells in _by_defence(rows).items():
            values = _values(cells, radii, kind)
            if any(value is not None for value in values):
                lines.append(figures.line(defence, values, kind == "paper"))
    return {
        "title": f"L{norm}",
        "radii": radii,
        "xlabel": f"L{norm} radius rho, in the network's input units",
        "lines": lines,
    }
