"""Result pages: Markdown, CSV and PNG of one name."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from keras_rub.files import write_atomically
from reproduction.context import Context

BUDGET_TEXTS = {
    "smoke": (
        "smoke: a few steps on embedded data, to show that everything runs. "
        "The figures mean nothing."
    ),
    "laptop": "laptop: real data, sizes for hours on 2 cores.",
    "full": "full: the paper's grid.",
}


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""

    def line(cells):
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    rule = "| --- |" + " ---: |" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, rows)])


def percent(value: float | None, bold: bool = False) -> str:
    """A percent for a table; a dash where there is none."""
    if value is None:
        return "-"
    return f"**{value:.2f}**" if bold else f"{value:.2f}"


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def write(
    context: Context,
    name: str,
    title: str,
    *,
    about: str,
    units: Sequence[str],
    body: Sequence[str],
    differences: Sequence[str],
    rows: Sequence[dict[str, Any]],
    figure: Figure | None,
) -> None:
    """Writes NAME.md, NAME.csv and NAME.png in the results folder.

    Args:
        context: `Context`.
        name: of the experiment.
        title: of the page.
        about: what is shown, in a sentence or two.
        units: what the inputs are, and the factor.
        body: parts of the page, Markdown.
        differences: what differs from the paper.
        rows: of the CSV file, with equal keys.
        figure: the picture, if any.
    """
    parts = [
        f"# {title}",
        about,
        f"```sh\n{context.command.format(name=name)}\n```",
        bullets(
            [
                f"Budget: {BUDGET_TEXTS[context.budget]}",
                *(f"Inputs: {text}" for text in units),
                f"All figures: [{name}.csv]({name}.csv)",
            ]
        ),
    ]
    if figure is not None:
        parts.append(f"![{title}]({name}.png)")
        _save(figure, context.results / f"{name}.png")
    parts += body
    if differences:
        parts += ["## What differs from the paper", bullets(differences)]
    write_atomically(context.results / f"{name}.md", "\n\n".join(parts) + "\n")
    write_atomically(context.results / f"{name}.csv", _csv(rows))
    print(f"written to {context.results / name}.md", flush=True)


def read_rows(context: Context, name: str) -> list[dict[str, str]]:
    """The rows of a page's CSV file; none if the page does not exist."""
    path = context.results / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _csv(rows) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _save(figure, path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial.png")
    # Without the version of matplotlib the same figures give the same file.
    figure.savefig(partial, dpi=110, metadata={"Software": None})
    partial.replace(path)
