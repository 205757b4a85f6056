"""The pictures of the pages. Each function returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from keras_rub.reproduction.plans import MASKED
from keras_rub.reproduction.rows.summary import Status

COLOURS = {
    "RUB": "#c0392b",
    "aRUB-L1": "#e67e22",
    "aRUB-Linf": "#8e44ad",
    "Baseline-Linf": "#7f8c8d",
    "PGD-Linf": "#1f6f8b",
    "FGSM-Linf": "#16a085",
    "COAP-Linf": "#b7950b",
    "Nominal": "#2c3e50",
    MASKED: "#aab7b8",
}
_MARKERS = dict(zip(COLOURS, "osD^vP*Xh", strict=True))

# Of cells of the summary.
_STATUS_COLOURS = {
    Status.REACHED: "#1f6f8b",
    Status.LEVEL: "#85c1e9",
    Status.OTHER: "#a3c9a8",
    Status.BEYOND: "#c8c8c8",
    Status.UNSEEN: "#e0b050",
    Status.BEHIND: "#c0392b",
}


def _panels(rows: int, columns: int, width=4.6, height=3.4, **options):
    figure = Figure(
        figsize=(width * columns, height * rows + 0.5), layout="constrained"
    )
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _legend_below(figure, columns: int) -> None:
    """One legend of what is drawn in any panel."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def ranks(panels: list[dict[str, Any]]) -> Figure:
    """Average ranks over the size of the attack.

    Args:
        panels: dicts with `title`, `numbers`, and `curves`: from the
            defence to its mean ranks and the halves of their intervals.
    """
    figure, axes = _panels(
        len(panels) // 2, 2, width=5.2, height=3.0, sharey=True
    )
    for panel, ax in zip(panels, axes.flat, strict=True):
        places = np.arange(len(panel["numbers"]))
        shifts = np.linspace(-0.15, 0.15, len(panel["curves"]))
        for shift, (name, (mean, half)) in zip(
            shifts, panel["curves"].items(), strict=True
        ):
            ax.errorbar(
                places + shift,
                mean,
                yerr=half,
                color=COLOURS[name],
                marker=_MARKERS[name],
                ms=4,
                lw=1.3,
                elinewidth=0.8,
                capsize=2,
                label=name,
            )
        ax.set_title(panel["title"], fontsize=10)
        ax.set_xticks(places, [f"{n:g}" for n in panel["numbers"]])
        ax.set_xlabel(panel["xlabel"], fontsize=9)
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylim(len(panels[0]["curves"]) + 0.2, 0.8)
    for ax in axes[:, 0]:
        ax.set_ylabel("average rank\n(1 is best)")
    _legend_below(figure, 6)
    return figure


def histograms(rows: list[list[dict[str, Any]]]) -> Figure:
    """Numbers of data sets by gain in accuracy.

    Args:
        rows: of panels: dicts with `title`, `gains` in percentage points,
            and `colour`, the name of a defence.
    """
    figure, axes = _panels(
        len(rows), max(map(len, rows)), height=2.9, sharey=True
    )
    every = [abs(g) for row in rows for panel in row for g in panel["gains"]]
    reach = max(10.0, 5.0 * np.ceil(max(every, default=10.0) / 5.0)) + 2.5
    edges = np.arange(-reach, reach + 0.1, 5.0)
    for panels, line in zip(rows, axes, strict=True):
        for ax in line[len(panels) :]:
            ax.set_visible(False)
        for panel, ax in zip(panels, line, strict=False):
            ax.hist(
                panel["gains"],
                bins=edges,
                color=COLOURS[panel["colour"]],
                edgecolor="white",
            )
            ax.axvline(0.0, color="black", lw=0.8)
            ax.set_title(panel["title"], fontsize=10)
            ax.set_xlabel("gain, percentage points", fontsize=9)
            ax.grid(alpha=0.3, axis="y")
            ax.yaxis.get_major_locator().set_params(integer=True)
        line[0].set_ylabel("data sets")
    return figure


def loss_curves(curves: dict[tuple[str, float], dict[str, Any]]) -> Figure:
    """Minimised and attacked loss over training, a panel a network."""
    titles = sorted({title for title, _ in curves})
    radii = sorted({rho for _, rho in curves})
    figure, axes = _panels(
        len(radii), len(titles), width=5.0, height=2.6, sharex=True,
        sharey="row",
    )  # fmt: skip
    for row, rho in zip(axes, radii, strict=True):
        for ax, title in zip(row, titles, strict=True):
            found = curves.get((title, rho))
            ax.set_title(f"{title}, rho = {rho:g}", fontsize=10)
            ax.grid(alpha=0.3, which="both")
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(_some_minor_ticks)
            if found is None:
                continue
            steps = found["step"]
            ax.plot(
                steps, found["minimised"], color="#1f6f8b", lw=1.6,
                label="loss that is minimised",
            )  # fmt: skip
            ax.plot(
                steps, found["attacked"], color="#c0392b", lw=1.6, ls="--",
                label="loss under PGD-Linf",
            )  # fmt: skip
            ax.plot(
                steps, found["clean"], color="0.5", lw=1.0, ls=":",
                label="clean loss",
            )  # fmt: skip
    for ax in axes[-1]:
        ax.set_xlabel("training step")
    for ax in axes[:, 0]:
        ax.set_ylabel("cross entropy")
    _legend_below(figure, 3)
    return figure


def _some_minor_ticks(value: float, position: int) -> str:
    """Labels 0.2, 0.3, 0.5: more would touch each other."""
    del position
    digit = round(value / 10 ** np.floor(np.log10(value)))
    return f"{value:g}" if digit in (2, 3, 5) else ""


def curves(
    panels: list[dict[str, Any]], ylabel: str, legend_columns: int = 4
) -> Figure:
    """Lines over equally spaced radii.

    Args:
        panels: dicts with `title`, `radii`, `xlabel` and `lines`: dicts with
            `values` (`None` for a gap), `label` and matplotlib styles. With
            `ticks`, these words stand below the radii's places.
        ylabel: of all panels.
        legend_columns: of the legend below.
    """
    width = 7.5 if len(panels) == 1 else 5.0
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    figure, axes = _panels(
        -(-len(panels) // columns), columns, width, height=3.8, sharey=True
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for panel, ax in zip(panels, axes.flat, strict=False):
        places = np.arange(len(panel["radii"]))
        for line in panel["lines"]:
            style = {k: v for k, v in line.items() if k != "values"}
            values = [np.nan if v is None else v for v in line["values"]]
            if not np.all(np.isnan(values)):
                ax.plot(places, values, **style)
        labels = panel.get("ticks") or [f"{rho:g}" for rho in panel["radii"]]
        many = "ticks" not in panel and sum(map(len, labels)) > 35
        ax.set_xticks(
            places,
            labels,
            rotation=45 if many else 0,
            fontsize=8 if "ticks" in panel else None,
        )
        ax.set_xlabel(panel["xlabel"], fontsize=9)
        ax.set_title(panel["title"], fontsize=10)
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel(ylabel)
    _legend_below(figure, legend_columns)
    return figure


def line(name: str, values: Sequence[float | None], paper: bool) -> dict:
    """A line of `curves` in the colour of a defence."""
    return {
        "values": values,
        "label": f"{name}, {'paper' if paper else 'ours'}",
        "color": COLOURS[name],
        "marker": _MARKERS[name],
        "ms": 4,
        "lw": 1.0 if paper else 1.7,
        "ls": ":" if paper else "-",
        "alpha": 0.7 if paper else 1.0,
    }


def bars(groups: list[dict[str, Any]], ylabel: str, log: bool) -> Figure:
    """Bars of two kinds side by side.

    Args:
        groups: a panel each: dicts with `title`, `names`, and `values`: from
            the kind to one number a name, `None` for none.
        ylabel: of the panels.
        log: whether the axis is logarithmic.
    """
    columns = min(2, len(groups))
    figure, axes = _panels(
        -(-len(groups) // columns), columns, width=5.6, height=3.6
    )
    for ax in axes.flat[len(groups) :]:
        ax.set_visible(False)
    colours = ("#bdc3c7", "#1f6f8b", "#c0392b")
    for group, ax in zip(groups, axes.flat, strict=False):
        places = np.arange(len(group["names"]))
        width = 0.8 / len(group["values"])
        for index, (kind, values) in enumerate(group["values"].items()):
            ax.bar(
                places + (index - (len(group["values"]) - 1) / 2) * width,
                [np.nan if v is None else v for v in values],
                width,
                color=colours[index % 3],
                label=kind,
            )
        ax.set_xticks(places, group["names"], rotation=35, ha="right")
        ax.set_title(group["title"], fontsize=10)
        ax.grid(alpha=0.3, axis="y")
        ax.set_yscale("log" if log else "linear")
        ax.axhline(1.0 if log else 0.0, color="black", lw=0.6)
        ax.set_ylabel(ylabel)
    _legend_below(figure, len(groups[0]["values"]))
    return figure


def gains(tables: dict[str, list[dict[str, Any]]]) -> Figure:
    """Gains over the paper, a row of bars a table, coloured by status."""
    columns = min(3, len(tables))
    figure, axes = _panels(
        -(-len(tables) // columns), columns, height=2.5, sharey=False
    )
    for ax in axes.flat[len(tables) :]:
        ax.set_visible(False)
    for (title, rows), ax in zip(tables.items(), axes.flat, strict=False):
        values = [row["gain"] for row in rows]
        colours = [_STATUS_COLOURS[row["status"]] for row in rows]
        places = np.arange(len(rows))
        ax.bar(places, values, color=colours)
        ax.set_xticks(places, [f"{row['rho']:g}" for row in rows], fontsize=8)
        ax.axhline(0.0, color="black", lw=0.8)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("radius rho", fontsize=9)
        ax.grid(alpha=0.3, axis="y")
    for ax in axes[:, 0]:
        ax.set_ylabel("ours less paper,\npercentage points", fontsize=9)
    return figure
