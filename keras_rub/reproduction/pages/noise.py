"""What the paper's figures at large radii depend on: random noise."""

from __future__ import annotations

from typing import Any

from keras_rub import tables
from keras_rub.reproduction.pages import figures, words
from keras_rub.reproduction.pages.attacked import TITLES
from keras_rub.reproduction.plans import ProtocolPlan
from keras_rub.reproduction.rows.protocol import (
    SAMPLING,
    noticeable,
    untouched,
)

# Starts of different norms count as alike if their ratio is below this.
_ALIKE = 1.25
_CLOSE = 3.0  # percentage points between such starts


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


def _untouched_text(rows, ceilings) -> list[str]:
    """What `untouched` found, in words."""
    sentences = []
    for title, (first, alike) in untouched(rows, ceilings).items():
        cells = ", ".join(
            f"L{row['norm']} {row['rho']:g} ({row['paper']:.2f})"
            for row in alike
        )
        sentences.append(
            f"{title} has {first['paper']:.2f} % at L{first['norm']} "
            f"{first['rho']:g}, where no classifier can have more than "
            f"{first['ceiling']:.2f} %, and the same within {SAMPLING:g} "
            f"points at {cells}."
        )
    if not sentences:
        return []
    return [
        "Some rows of the paper are as high where nobody can be as at smaller "
        "radii: "
        + " ".join(sentences)
        + " What the attack did not find at the one it did not find at the "
        "others."
    ]


def part(
    plan: ProtocolPlan,
    rows: list[dict[str, Any]],
    scaled: list[dict[str, Any]],
    ceilings: list[dict[str, Any]],
) -> list[str]:
    """The paper's figures by the noise that its PGD begins with.

    Args:
        plan: `ProtocolPlan`.
        rows: of `rows.protocol.starts`, of one data set.
        scaled: of `rows.protocol.scaled`, which are set beside them.
        ceilings: of `rows.protocol.ceilings`.

    Returns:
        Paragraphs; none if no two norms have starts that are alike.
    """
    lines = noticeable(rows)
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
        "foolbox's PGD begins at a random point of the ball. Where its "
        "gradient is missing or leads nowhere, the accuracy it leaves depends "
        "on how far that point is from the image, and on nothing else: on the "
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
        *_untouched_text(rows, ceilings),
    ]  # fmt: skip


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


def panels(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as a panel of `figures.curves`, or none.

    Args:
        name: of the data set.
        rows: of `rows.protocol.starts`.
    """
    lines = noticeable(rows)
    if all(norm_gap(some) is None for some in lines.values()):
        return []
    cells = next(iter(lines.values()))
    panel = {
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
    return [panel]
