"""A result page: Markdown, CSV and PNG of one name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from keras_rub import tables
from keras_rub.files import write_atomically, write_figure
from keras_rub.reproduction.context import Context

BUDGET_TEXTS = {
    "smoke": (
        "smoke: a few steps on embedded data, to show that everything runs. "
        "The figures mean nothing."
    ),
    "laptop": "laptop: real data, sizes for hours on 2 cores.",
    "full": "full: the paper's grid.",
}


@dataclasses.dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        name: of the experiment.
        title: of the page.
        about: what is shown, in a sentence or two.
        units: what the inputs are, and the factor.
        body: parts of the page, Markdown.
        differences: what differs from the paper.
        rows: of the CSV file.
        figure: the picture.
    """

    name: str
    title: str
    about: str
    units: Sequence[str]
    body: Sequence[str]
    differences: Sequence[str]
    rows: Sequence[dict[str, Any]]
    figure: Figure

    def markdown(self, budget: str) -> str:
        """The text of the page."""
        command = f"tools/reproduce.py --what {self.name} --budget {budget}"
        parts = [
            f"# {self.title}",
            self.about,
            f"```sh\npython {command}\n```",
            _bullets(
                [
                    f"Budget: {BUDGET_TEXTS[budget]}",
                    *(f"Inputs: {text}" for text in self.units),
                    f"All figures: [{self.name}.csv]({self.name}.csv)",
                ]
            ),
            f"![{self.title}]({self.name}.png)",
            *self.body,
            "## What differs from the paper",
            _bullets(self.differences),
        ]
        return "\n\n".join(parts) + "\n"

    def write(self, context: Context) -> None:
        """Writes NAME.md, NAME.csv and NAME.png in the results folder."""
        path = context.results / f"{self.name}.md"
        write_figure(self.figure, path.with_suffix(".png"), dpi=110)
        write_atomically(path, self.markdown(context.budget))
        write_atomically(path.with_suffix(".csv"), tables.to_csv(self.rows))
        print(f"written to {path}", flush=True)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
