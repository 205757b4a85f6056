"""The page on certified L1 accuracy, made of the zoo's index."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

from matplotlib.figure import Figure

from keras_rub import tables, training

_PUBLISHED = pathlib.Path(__file__).parent / "published_l1.csv"
_TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
}

Index = dict[str, dict[str, Any]]


def published() -> list[dict[str, str]]:
    """Figures of other papers, one row a data set, method and radius."""
    with open(_PUBLISHED, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def chosen(index: Index) -> dict[str, dict[float, str]]:
    """The network of each data set and radius, by name.

    A radius takes the network that was trained for the smallest radius not
    below it, whatever its figures are: the test set chooses nothing. Of those
    that differ in the seed the first seed counts. Networks count whose figures
    speak of an L1 attacker who can change every feature.

    Args:
        index: of `keras_rub.zoo.read_index`.
    """
    groups: dict[str, list[str]] = {}
    for name, entry in index.items():
        attacker = entry["attacker"]
        free = not (attacker["mask"] or attacker["weights"])
        if attacker["norm"] == 1 and free:
            groups.setdefault(entry["training"]["dataset"], []).append(name)
    order = [*(set_ for set_ in _TITLES if set_ in groups), *groups]
    found: dict[str, dict[float, str]] = {}
    for dataset in dict.fromkeys(order):
        names = sorted(groups[dataset], key=lambda n: _order(index[n], n))
        radii = sorted({float(r) for n in names for r in index[n]["radii"]})
        cells = {}
        for rho in radii:
            able = [n for n in names if _radius(index[n], rho) is not None]
            fit = [n for n in able if index[n]["training"]["rho"] >= rho]
            if not fit:
                most = index[able[-1]]["training"]["rho"]
                fit = [n for n in able if index[n]["training"]["rho"] == most]
            cells[rho] = fit[0]
        found[dataset] = cells
    return found


def _order(entry: dict[str, Any], name: str) -> tuple[float, int, str]:
    """Small radii first, then the first seed."""
    recipe = entry["training"]
    return recipe["rho"], recipe["seed"], name


def _again(index: Index, name: str, rho: float) -> list[float]:
    """Certified percents of the same recipe with other seeds."""

    def recipe(entry):
        return {**training.ADDED, **entry["training"], "seed": 0}

    entry = index[name]
    return [
        other["certified"][text]["percent"]
        for key, other in index.items()
        if key != name
        and recipe(other) == recipe(entry)
        and other["attacker"] == entry["attacker"]
        and (text := _radius(other, rho)) is not None
    ]


def _radius(entry: dict[str, Any], rho: float) -> str | None:
    """How the entry writes a radius, if it has figures of it."""
    return next((text for text in entry["radii"] if float(text) == rho), None)


def rows(index: Index) -> list[dict[str, Any]]:
    """Ours and published ones, one row a data set, radius and method."""
    theirs = published()
    found = []
    for dataset, cells in chosen(index).items():
        for rho, name in cells.items():
            entry = index[name]
            text = _radius(entry, rho)
            attacked = entry.get("attacked", {}).get(text)
            found.append(
                {
                    "data": dataset,
                    "rho": rho,
                    "method": name,
                    "kind": entry["network"],
                    "clean": entry["clean"]["percent"],
                    "attacked": attacked and attacked["percent"],
                    "certified": entry["certified"][text]["percent"],
                    "again": _again(index, name, rho),
                    "ours": True,
                }
            )
            found += [
                {
                    "data": dataset,
                    "rho": rho,
                    "method": row["method"],
                    "kind": row["kind"],
                    "clean": float(row["clean"]) if row["clean"] else None,
                    "attacked": None,
                    "certified": float(row["certified"]),
                    "again": [],
                    "ours": False,
                }
                for row in theirs
                if row["data"] == dataset and float(row["rho"]) == rho
            ]
    return found


def _part(index: Index, dataset: str, found: list[dict[str, Any]]) -> str:
    """The table of one data set, of its rows, with what they are about."""
    names = dict.fromkeys(row["method"] for row in found if row["ours"])
    units = dict.fromkeys(index[name]["units"] for name in names)
    samples = dict.fromkeys(
        f"{index[name]['samples']} certified, "
        f"{index[name]['attack_samples']} attacked"
        for name in names
    )
    lines = [
        [
            f"{row['rho']:g}",
            f"`{row['method']}`" if row["ours"] else row["method"],
            row["kind"],
            *(
                "" if row[key] is None else f"{row[key]:.2f}"
                for key in ("clean", "attacked", "certified")
            ),
            ", ".join(f"{value:.2f}" for value in row["again"]),
        ]
        for row in found
    ]
    table = tables.to_markdown(
        ["rho", "network", "kind", "clean", "attacked", "certified",
         "other seeds"],
        lines,
    )  # fmt: skip
    return (
        f"## {_TITLES.get(dataset, dataset)}\n\n"
        f"Radii in {'; '.join(units)}. Test samples of ours: "
        f"{'; '.join(samples)}.\n\n{table}"
    )


def page(index: Index) -> str:
    """The leaderboard, in Markdown."""
    found = rows(index)
    parts = [
        _part(index, dataset, [row for row in found if row["data"] == dataset])
        for dataset in dict.fromkeys(row["data"] for row in found)
    ]
    sources = {row["method"]: row["source"] for row in published()}
    body = "\n\n".join(parts)
    return f"""# L1 leaderboard

Certified accuracy against L1 attackers: percent of the test samples whose class
no attacker within the radius can change. Ours are plain networks, which answer
with one forward pass; a smoothed network answers with many, and its figures are
about the vote.

```sh
keras-rub zoo --leaderboard docs/leaderboard.md
```

makes this page of `zoo/index.json` ([Zoo](zoo.md)), where the recipe of each
network stands; `make verify-zoo` recomputes the figures of those that have a
file. A radius takes the network that was trained for the smallest radius not
below it, so that the test set chooses nothing. "Attacked" is what the strongest
of our attacks leaves. It counts the first samples only, and so may exceed
"clean"; on the same samples the truth lies between it and "certified". "Other
seeds" is what the same recipe comes to with these, certified.

![Certified accuracy over the L1 radius](images/leaderboard.png)

{body}

## Published figures

{chr(10).join(f"- {method}: {source}." for method, source in sources.items())}

They are the papers' own, with their networks and training; blank where the
paper's figure is not at hand. To add one, add a row to
`keras_rub/cli/published_l1.csv`.
"""


def figure(index: Index) -> Figure:
    """Certified, attacked and published accuracy over the radius."""
    found = rows(index)
    names = [
        name for name in _TITLES if any(row["data"] == name for row in found)
    ] or list(dict.fromkeys(row["data"] for row in found))
    count = max(len(names), 1)  # an empty panel where there is no network
    drawn = Figure(figsize=(4.4 * count, 3.8), layout="constrained")
    panels = drawn.subplots(1, count, squeeze=False, sharey=True)[0]
    for name, ax in zip(names, panels, strict=False):
        some = [row for row in found if row["data"] == name]
        ours = [row for row in some if row["ours"]]
        for key, label, style in (
            ("attacked", "ours, attacked", "^--"),
            ("certified", "ours, certified", "o-"),
        ):
            points = [row for row in ours if row[key] is not None]
            ax.plot(
                [row["rho"] for row in points],
                [row[key] for row in points],
                style,
                color="#c0392b" if key == "certified" else "#e67e22",
                label=label,
            )
        others = [row for row in some if not row["ours"]]
        for method in dict.fromkeys(row["method"] for row in others):
            points = [row for row in others if row["method"] == method]
            ax.plot(
                [row["rho"] for row in points],
                [row["certified"] for row in points],
                "s:",
                color="#1f6f8b",
                label=f"{method}, certified",
            )
        ax.set_title(_TITLES.get(name, name), fontsize=10)
        ax.set_xlabel("L1 radius")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="lower left")
    panels[0].set_ylabel("accuracy, %")
    panels[0].set_ylim(0, 102)
    return drawn
