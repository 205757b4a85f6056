"""An evaluation as one HTML file that can be handed on."""

from __future__ import annotations

import base64
import html
import io
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import tables
from keras_rub.evaluation import plots
from keras_rub.evaluation.flips import Flips
from keras_rub.evaluation.result import Evaluation
from keras_rub.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPELLED_OUT = 5  # rows that are told in words

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 68rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .7rem;
       border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child, .settings td { text-align: left; }
.wide { overflow-x: auto; font-size: .9rem; }
.wide th, .wide td { padding: .25rem .45rem; } .changes, .becomes, .decision,
.wide td:first-child { text-align: left; }
td.worst { color: #a93226; } td.certified { color: #1f6f8b; }
.warning { background: #fdecea; border-left: 4px solid #c0392b;
       padding: .5rem .8rem; margin: .5rem 0; }
.note { background: #eef3f6; border-left: 4px solid #1f6f8b;
       padding: .5rem .8rem; margin: .5rem 0; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: .8rem;
       overflow-x: auto; font-size: 12px; }
"""


def html_report(
    result: Evaluation,
    *,
    title: str = "Robustness report",
    model: keras.Model | None = None,
    settings: dict[str, Any] | None = None,
    command: str = "",
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    flips: Flips | None = None,
    units: str = "the model's input",
) -> str:
    """A self-contained HTML page: tables, plots, examples, settings.

    Args:
        result: the evaluation.
        title: str. Heading of the page.
        model: the model, for its summary. Defaults to `None`, left out.
        settings: what else the reader should know, as names and values.
        command: the command that makes the page again.
        feature_names: names of the features of a table.
        class_names: names of the classes.
        flips: what `keras_rub.flips` found for some rows of a table, to be
            spelled out. Defaults to `None`, left out.
        units: what a radius of 1 means, in words.

    Returns:
        The page; it refers to no other file.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _summary(result, units)]
    parts += [_box("warning", text) for text in result.warnings]
    if result.signs is not None and not result.warnings:
        parts.append(_box("note", "No sign of false safety was found."))
    parts += [_box("note", text) for text in result.notes]
    parts.append("<h2>Accuracy</h2>")
    columns, rows = result.cells(intervals=True)
    parts.append(_scrolling(tables.to_html(columns, rows)))
    parts.append(_picture(plots.accuracy_curves(result), "accuracy curves"))
    parts.append(_legend(columns))
    parts.append("<h2>Accuracy by class</h2>")
    by_class = result.cells_by_class(class_names)
    parts.append(_scrolling(tables.to_html(*by_class)))
    if flips is not None:
        parts += _answers(flips)
    parts += _examples(result, feature_names, class_names)
    if settings:
        table = tables.to_html(None, list(settings.items()), kind="settings")
        parts.append(f"<h2>Settings</h2>{table}")
    if model is not None:
        lines: list[str] = []
        model.summary(line_length=90, print_fn=lines.append, expand_nested=True)
        text = html.escape("\n".join(lines))
        parts.append(f"<h2>Model</h2><pre>{text}</pre>")
    if command:
        parts.append(f"<h2>Command</h2><pre>{html.escape(command)}</pre>")
    parts.append(f"<h2>Versions</h2><p>{html.escape(versions())}</p>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def versions() -> str:
    """The versions that figures depend on, in one line."""
    return (
        f"keras_rub {__version__}, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, NumPy {np.__version__}, Python "
        f"{platform.python_version()}"
    )


def _summary(result, units) -> str:
    clean = tables.percent_with_interval(result.clean_accuracy, len(result))
    text = (
        f"{len(result)} samples, clean accuracy {clean}. "
        f"Attacker: {result.attacker}. A radius is in units of: {units}."
    )
    return f"<p>{html.escape(text)}</p>"


def _box(kind, text) -> str:
    label = "Warning: " if kind == "warning" else ""
    return f'<div class="{kind}">{label}{html.escape(text)}</div>'


def _legend(columns) -> str:
    paper = (
        "<b>paper</b>: the smaller of the accuracies under foolbox's FGM and "
        "PGD. "
    )
    return (
        "<p><b>worst</b>: no attack of the list broke the sample, at this "
        "radius or a smaller one; <i>all attacks</i> in the figure. "
        f"{paper if 'paper' in columns else ''}"
        "<b>certified</b>: proved for every "
        "perturbation of that size. The true robust accuracy lies between "
        "certified and worst. In brackets: Wilson's 95 % interval, for the "
        "samples are few of many.</p>"
    )


def _scrolling(table: str) -> str:
    # A line may end before an interval, not inside it.
    table = re.sub(r"\(([\d.]+) to ([\d.]+)\)", r"(\1&nbsp;to&nbsp;\2)", table)
    return f'<div class="wide">{table}</div>'


def _answers(found: Flips):
    """The section on the rows whose cheapest changes are known."""
    yield "<h2>Who can flip which decision, at what price</h2>"
    counts = int(np.isfinite(found.price).sum())
    text = (
        f"{len(found)} rows, of which {counts} could be flipped. Up to the "
        "certified price no change flips the decision; at the price found one "
        "does; between the two it is not known. Attacker: "
        f"{found.attacker}. A price is in units of: {found.units}."
    )
    yield f"<p>{html.escape(text)}</p>"
    yield _picture(plots.price_steps(found), "decisions that stand by price")
    finite = np.flatnonzero(np.isfinite(found.price))
    cheapest = finite[np.argsort(found.price[finite])[:_SPELLED_OUT]]
    if len(cheapest):
        yield "<h3>The cheapest, spelled out</h3><ul>"
        yield from (f"<li>{_sentence(found, row)}</li>" for row in cheapest)
        yield "</ul>"
    if len(finite):
        yield "<h3>Columns in the cheapest changes</h3>"
        yield _picture(plots.column_usage(found), "columns in changes")
    yield "<h3>All rows</h3>"
    yield _scrolling(tables.to_html(*found.cells()))


def _sentence(found: Flips, row: int) -> str:
    """One row in words, as HTML."""

    def word(value):
        return f"<b>{html.escape(str(value))}</b>"

    changes = ", ".join(
        f"{html.escape(str(change))} ({change.price:.3g})"
        for change in found.changes[row]
    )
    return (
        f"Row {row} is {word(found.predicted[row])}. It becomes "
        f"{word(found.becomes[row])} at a price of {found.price[row]:.3g} by "
        f"{changes}. No change below {found.certified[row]:.3g} does."
    )


def _examples(result, feature_names, class_names):
    for norm, examples in result.examples.items():
        if not examples:
            continue
        if examples[0]["clean"].ndim == 3:
            figure = plots.image_grid(result, norm, class_names)
        else:
            figure = plots.feature_changes(result, norm, feature_names)
        yield f"<h2>Attacked samples, L{norm}</h2>"
        yield _picture(figure, f"attacked samples, L{norm}")


def _picture(figure: Figure, about: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<p><img alt="{html.escape(about)}" '
        f'src="data:image/png;base64,{data}"></p>'
    )
