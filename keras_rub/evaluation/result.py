"""What an evaluation found, sample by sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_rub import tables
from keras_rub.attacks import PAPER
from keras_rub.evaluation import signs
from keras_rub.perturbations import PerturbationSet

NormName = str  # "1", "2" or "inf": JSON has no other keys than strings


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Evaluation:
    """Accuracy of one model under attack, beside what is certified.

    Attributes:
        labels: int array [n]. The true classes.
        predicted: int array [n]. The classes predicted for the clean inputs.
        radii: dict from the norm (`"1"`, `"2"`, `"inf"`) to its radii, in
            the units of the model's input.
        perturbations: the attacker; its norm is that of each row.
        standing: dict from the norm to a dict from the attack's name to a
            boolean array [radii, n]: still classified right.
        certified: dict from the norm to a boolean array [radii, n], for the
            norms that were certified.
        signs: what hints at false safety, see `keras_rub.evaluation.signs`;
            `None` if it was not looked for.
        examples: dict from the norm to a few attacked samples.
        notes: remarks, such as why there is no certificate.
    """

    labels: np.ndarray
    predicted: np.ndarray
    radii: dict[NormName, list[float]]
    perturbations: PerturbationSet
    standing: dict[NormName, dict[str, np.ndarray]]
    certified: dict[NormName, np.ndarray]
    signs: signs.Signs | None
    examples: dict[NormName, list[dict[str, Any]]]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def clean_accuracy(self) -> float:
        """Share of the samples that are classified right."""
        return float(np.mean(self.predicted == self.labels))

    @property
    def norms(self) -> list[NormName]:
        """The norms of the attacks."""
        return list(self.radii)

    @property
    def attacks(self) -> list[str]:
        """The names of the attacks."""
        return list(next(iter(self.standing.values()), {}))

    @property
    def attacker(self) -> str:
        """Whom the figures speak of, in words."""
        sets = [self.perturbations.with_norm(norm) for norm in self.norms]
        return "; ".join(map(str, sets))

    def worst(self, norm: Any) -> np.ndarray:
        """Which samples no attack broke, at this radius or a smaller one.

        Returns:
            Boolean array [radii, n].
        """
        norm = str(norm)
        right = (self.predicted == self.labels)[None]
        stands = np.broadcast_to(
            right, (len(self.radii[norm]), len(self))
        ).copy()
        for found in self.standing[norm].values():
            stands &= found
        # A point of a small ball is in the larger ones too.
        order = np.argsort(self.radii[norm])
        stands[order] = np.logical_and.accumulate(stands[order], axis=0)
        return stands

    def shares(self, where: slice | np.ndarray = slice(None)) -> dict[str, Any]:
        """All accuracies from 0 to 1, as plain numbers ready for JSON.

        Args:
            where: slice, or indices of the samples that count. Defaults to
                all.

        Returns:
            Dict with `clean`, a number; `attacked`, from the norm to a dict
            from the attack to one number a radius; `worst` and `certified`,
            from the norm to one number a radius.
        """

        def mean(found):
            return np.mean(found[..., where], axis=-1).tolist()

        return {
            "clean": mean(self.predicted == self.labels),
            "attacked": {
                norm: {name: mean(found) for name, found in attacks.items()}
                for norm, attacks in self.standing.items()
            },
            "worst": {norm: mean(self.worst(norm)) for norm in self.radii},
            "certified": {
                norm: mean(found) for norm, found in self.certified.items()
            },
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row a norm and radius, accuracies from 0 to 1.

        `paper` is the smaller of the two accuracies under foolbox's FGM and
        PGD, as the paper reports it; `worst` counts a sample as broken if
        any attack broke it.
        """
        rows = []
        for norm, radii in self.radii.items():
            worst = self.worst(norm)
            for index, rho in enumerate(radii):
                attacked = {
                    name: float(np.mean(found[index]))
                    for name, found in self.standing[norm].items()
                }
                row = {"norm": norm, "rho": rho, "clean": self.clean_accuracy}
                row.update(attacked)
                if all(name in attacked for name in PAPER):
                    row["paper"] = min(attacked[name] for name in PAPER)
                if attacked:
                    row["worst"] = float(np.mean(worst[index]))
                if norm in self.certified:
                    row["certified"] = float(
                        np.mean(self.certified[norm][index])
                    )
                rows.append(row)
        return rows

    @property
    def warnings(self) -> list[str]:
        """What speaks against trusting the figures."""
        return signs.warnings_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists, ready for JSON."""

        def plain(value):
            if isinstance(value, np.ndarray):
                value = value.astype(int) if value.dtype == bool else value
                return value.tolist()
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(item) for item in value]
            return value

        return {
            "summary": self.rows,
            "warnings": self.warnings,
            "labels": plain(self.labels),
            "predicted": plain(self.predicted),
            "radii": self.radii,
            "perturbations": self.perturbations.get_config(),
            "standing": plain(self.standing),
            "certified": plain(self.certified),
            "signs": None
            if self.signs is None
            else plain(dataclasses.asdict(self.signs)),
            "examples": plain(self.examples),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Evaluation:
        """The evaluation that `to_dict` described."""
        try:
            return cls._from_state(state)
        # What a dict of another form raises, wherever it differs.
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                "`state` must be what `Evaluation.to_dict` returned. Received: "
                f"{type(state).__name__} ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> Evaluation:
        def flags(value):
            return np.array(value, bool)

        return cls(
            labels=np.array(state["labels"]),
            predicted=np.array(state["predicted"]),
            radii=state["radii"],
            perturbations=PerturbationSet.from_config(state["perturbations"]),
            standing={
                norm: {name: flags(found) for name, found in attacks.items()}
                for norm, attacks in state["standing"].items()
            },
            certified={
                norm: flags(found) for norm, found in state["certified"].items()
            },
            signs=None
            if state["signs"] is None
            else signs.Signs.from_dict(state["signs"]),
            examples={
                norm: [
                    {
                        key: np.array(value, "float32")
                        if isinstance(value, list)
                        else value
                        for key, value in example.items()
                    }
                    for example in examples
                ]
                for norm, examples in state["examples"].items()
            },
            notes=tuple(state["notes"]),
        )

    @classmethod
    def merge(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """One evaluation of several runs on different samples.

        It has signs only if all of them have.
        """
        first = parts[0]
        seen = [part.signs for part in parts if part.signs is not None]

        def join(arrays):
            return np.concatenate(arrays, axis=-1)

        notes = dict.fromkeys(note for part in parts for note in part.notes)
        return cls(
            labels=join([part.labels for part in parts]),
            predicted=join([part.predicted for part in parts]),
            radii=first.radii,
            perturbations=first.perturbations,
            standing={
                norm: {
                    name: join([part.standing[norm][name] for part in parts])
                    for name in attacks
                }
                for norm, attacks in first.standing.items()
            },
            certified={
                norm: join([part.certified[norm] for part in parts])
                for norm in first.certified
            },
            signs=signs.Signs.merge(seen) if len(seen) == len(parts) else None,
            examples=first.examples,
            notes=tuple(notes),
        )

    def to_json(self) -> str:
        """Everything as JSON; `from_dict(json.loads(...))` reads it."""
        return json.dumps(self.to_dict())

    def to_csv(self) -> str:
        """The table as CSV, accuracies from 0 to 1."""
        return tables.to_csv(self.rows)

    def to_markdown(self) -> str:
        """The table as Markdown, accuracies in percent."""
        lines = [
            tables.to_markdown(*self.cells()),
            f"\nAttacker: {self.attacker}.",
            *(f"\n> Warning: {text}" for text in self.warnings),
            *(f"\n> Note: {text}" for text in self.notes),
        ]
        return "\n".join(lines) + "\n"

    def cells(
        self, intervals: bool = False
    ) -> tuple[list[str], list[list[str]]]:
        """The table for readers: names of columns, and rows of cells.

        Args:
            intervals: bool. Whether each accuracy has its 95 % interval.
                Defaults to `False`.
        """
        rows = self.rows
        columns = tables.columns_of(rows)
        count = len(self) if intervals else None
        return columns, [
            [_cell(row, name, count) for name in columns] for row in rows
        ]

    def cells_by_class(
        self, class_names: Sequence[str] | None = None
    ) -> tuple[list[str], list[list[str]]]:
        """Accuracies of each class with their 95 % intervals, for readers.

        Args:
            class_names: names of the classes. Defaults to `None`, numbers.
        """
        header = ["class", "samples", "clean"]
        for norm, radii in self.radii.items():
            for kind in ("worst", "certified"):
                if kind == "certified" and norm not in self.certified:
                    continue
                if kind == "worst" and not self.standing[norm]:
                    continue
                header += [f"{kind}, L{norm} {rho:g}" for rho in radii]
        rows = []
        for number in np.unique(self.labels):
            own = np.flatnonzero(self.labels == number)
            found = self.shares(own)
            shares = [found["clean"]]
            for norm in self.radii:
                if self.standing[norm]:
                    shares += found["worst"][norm]
                shares += found["certified"].get(norm, [])
            name = str(number) if class_names is None else class_names[number]
            rows.append(
                [
                    name,
                    str(len(own)),
                    *(
                        tables.percent_with_interval(s, len(own))
                        for s in shares
                    ),
                ]
            )
        return header, rows

    def __repr__(self) -> str:
        lines = [
            f"{len(self)} samples, clean accuracy {self.clean_accuracy:.2%}",
            f"attacker: {self.attacker}",
            tables.to_text(*self.cells()),
        ]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(lines)


def _cell(row, name, count=None) -> str:
    value = row.get(name)
    if name == "norm":
        return f"L{value}"
    if name == "rho":
        return f"{value:g}"
    if count is not None:
        return tables.percent_with_interval(value, count)
    return tables.percent(value)
