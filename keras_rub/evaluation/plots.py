"""Pictures of an evaluation. Each function returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_rub.evaluation.flips import Flips
from keras_rub.evaluation.result import Evaluation
from keras_rub.perturbations import PerturbationSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ATTACKED, _CERTIFIED = "#c0392b", "#1f6f8b"
_FEATURES = 12  # most features of a table that are drawn
# Lines of attacks differ in dashes and marks, for those who see no colours.
_DASHES = ((4, 2), (1, 1.5), (6, 2, 1, 2), (3, 1, 1, 1, 1, 1), (8, 3))
_MARKS = "vd^xP*<"


def radius_label(attacker: PerturbationSet) -> str:
    """What an axis of radii says of their units."""
    if attacker.weights is None and not attacker.categories:
        return "radius rho, in the model's input units"
    return "price rho, by weights and switches"


def line_style(number: int) -> dict:
    """Dashes and marks of the line of this number."""
    return {
        "dashes": _DASHES[number % len(_DASHES)],
        "marker": _MARKS[number % len(_MARKS)],
    }


def accuracy_curves(result: Evaluation, title: str = "") -> Figure:
    """Attacked and certified accuracy over the radius, a panel for a norm."""
    count = len(result.norms)
    figure = _figure(figsize=(4.6 * count, 3.8), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    for axes, norm in zip(panels, result.norms, strict=True):
        order = np.argsort(result.radii[norm])
        radii = np.array([0.0, *np.array(result.radii[norm])[order]])

        def curve(flags, axes=axes, order=order, radii=radii, **style):
            shares = [result.clean_accuracy, *flags.mean(axis=1)[order]]
            axes.plot(radii, 100 * np.array(shares), **style)

        for number, (name, found) in enumerate(result.standing[norm].items()):
            curve(
                found,
                **line_style(number),
                lw=1.1,
                ms=4,
                alpha=0.75,
                label=name,
            )
        if result.standing[norm]:
            curve(
                result.worst(norm),
                color=_ATTACKED,
                lw=2.2,
                marker="o",
                label="all attacks",
            )
        if norm in result.certified:
            curve(
                result.certified[norm],
                color=_CERTIFIED,
                lw=2.2,
                dashes=(7, 1.5),
                marker="s",
                mfc="white",
                label="certified",
            )
            certified = result.certified[norm].mean(axis=1)[order]
            upper = result.worst(norm).mean(axis=1)[order]
            axes.fill_between(
                radii[1:],
                100 * certified,
                100 * upper,
                color="0.5",
                alpha=0.12,
                label="not known",
            )
        axes.set_title(f"L{norm}")
        axes.set_xlabel(radius_label(result.perturbations))
        axes.set_ylim(-2, 102)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=4)
    panels[0].set_ylabel("accuracy, %")
    if title:
        figure.suptitle(title)
    return figure


def price_steps(found: Flips, title: str = "") -> Figure:
    """How many decisions are safe below a price: proved, and not broken."""
    figure = _figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    finite = found.price[np.isfinite(found.price)]
    end = 1.1 * max([*finite, np.median(found.certified), 1e-9])
    for prices, style in (
        (
            found.price,
            {"color": _ATTACKED, "label": "no cheaper change was found"},
        ),
        (
            found.certified,
            {"color": _CERTIFIED, "ls": (0, (7, 1.5)), "label": "certified"},
        ),
    ):
        reached = np.sort(prices[prices <= end])
        left = 100 * (1 - np.arange(len(reached) + 1) / len(found))
        axes.step(
            [0.0, *reached, end],
            [*left, left[-1]],
            where="post",
            lw=2.2,
            **style,
        )
    axes.set_xlim(0, end)
    axes.set_ylim(-2, 102)
    axes.set_xlabel("price that an attacker pays")
    axes.set_ylabel("decisions that stand, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, handlelength=4)
    if title:
        axes.set_title(title, fontsize=10)
    return figure


def column_usage(found: Flips) -> Figure:
    """How often a column is part of the cheapest change."""
    used = {name: share for name, share in found.usage.items() if share}
    names = list(used)[:_FEATURES] or ["none"]
    shares = [100 * used.get(name, 0.0) for name in names]
    figure = _figure(
        figsize=(6.4, 0.32 * len(names) + 1.1), layout="constrained"
    )
    axes = figure.subplots()
    axes.barh(names, shares, color=_CERTIFIED, hatch="//", edgecolor="white")
    axes.invert_yaxis()
    axes.set_xlabel("% of the cheapest changes that the column is part of")
    axes.grid(axis="x", alpha=0.3)
    return figure


def image_grid(
    result: Evaluation,
    norm: int | str,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Rows of clean image, attacked image and their difference.

    Args:
        result: the evaluation.
        norm: 1, 2 or `"inf"`.
        class_names: names of the classes. Defaults to `None`, numbers.

    Raises:
        ValueError: if the inputs are no images [height, width, channels].
    """
    examples = result.examples[str(norm)]
    if not examples or examples[0]["clean"].ndim != 3:
        raise ValueError(
            "Pictures need image inputs [height, width, channels] and at "
            "least one kept example; use `feature_changes` for a table."
        )
    count = len(examples)
    figure = _figure(figsize=(1.5 * count + 0.6, 5.0), layout="constrained")
    grid = figure.subplots(3, count, squeeze=False)
    low = min(float(e["clean"].min()) for e in examples)
    high = max(float(e["clean"].max()) for e in examples)
    for column, example in enumerate(examples):
        change = example["attacked"] - example["clean"]
        reach = float(np.abs(change).max()) or 1.0
        after = example["predicted_attacked"]
        lost = after != example["label"]
        # Differences of colour images are shown as their sum over channels.
        pictures = (
            (example["clean"], _name(example["label"], class_names)),
            (example["attacked"], f"read as {_name(after, class_names)}"),
            (change.sum(axis=-1, keepdims=True), f"max {reach:.2g}"),
        )
        for row, (picture, text) in enumerate(pictures):
            axes = grid[row, column]
            if row == 2:
                peak = float(np.abs(picture).max()) or 1.0
                axes.imshow(
                    picture[..., 0], cmap="RdBu_r", vmin=-peak, vmax=peak
                )
            elif picture.shape[-1] == 1:
                axes.imshow(picture[..., 0], cmap="gray", vmin=low, vmax=high)
            else:
                scaled = (picture - low) / max(high - low, 1e-9)
                axes.imshow(np.clip(scaled, 0, 1))
            color = _ATTACKED if row == 1 and lost else "black"
            axes.set_title(text, fontsize=8, color=color)
            axes.set_xticks([])
            axes.set_yticks([])
    for row, name in enumerate(("clean", "attacked", "difference")):
        grid[row, 0].set_ylabel(name)
    figure.suptitle(f"L{norm}, rho = {examples[0]['rho']:g}", fontsize=10)
    return figure


def feature_changes(
    result: Evaluation,
    norm: int | str,
    feature_names: Sequence[str] | None = None,
) -> Figure:
    """Which features of a table the attacks changed, and by how much.

    Args:
        result: the evaluation.
        norm: 1, 2 or `"inf"`.
        feature_names: names of the flat features. Defaults to `None`,
            numbers.
    """
    examples = result.examples[str(norm)]
    if not examples:
        raise ValueError("No attacked samples were kept to be drawn.")
    weights = result.perturbations.weights
    changes = np.stack(
        [
            (
                (e["attacked"] - e["clean"])
                * (1.0 if weights is None else weights)
            ).reshape(-1)
            for e in examples
        ]
    )
    sizes = np.abs(changes).sum(axis=0)
    changed = max(int(np.count_nonzero(sizes)), 1)
    strongest = np.argsort(-sizes)[: min(changed, _FEATURES)]
    names = [
        str(i) if feature_names is None else str(feature_names[i])
        for i in strongest
    ]
    figure = _figure(
        figsize=(6.4, 0.32 * len(names) + 1.5), layout="constrained"
    )
    axes = figure.subplots()
    places = np.arange(len(names))
    width = 0.8 / len(examples)
    for row, (example, change) in enumerate(
        zip(examples, changes, strict=True)
    ):
        lost = example["predicted_attacked"] != example["label"]
        axes.barh(
            places + (row - (len(examples) - 1) / 2) * width,
            change[strongest],
            width,
            color=_ATTACKED if lost else _CERTIFIED,
            alpha=0.75,
        )
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", lw=0.8)
    axes.set_xlabel(
        "change, in the model's input units"
        if weights is None
        else "change, times the weight of the feature"
    )
    axes.set_title(
        f"L{norm}, rho = {examples[0]['rho']:g}: {len(examples)} samples, "
        "misread in red",
        fontsize=9,
    )
    axes.grid(axis="x", alpha=0.3)
    return figure


def _name(number, class_names) -> str:
    return str(number) if class_names is None else str(class_names[number])


def _figure(**settings) -> Figure:
    from matplotlib.figure import Figure  # slow to import, seldom needed

    return Figure(**settings)
