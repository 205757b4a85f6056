"""The results of a sweep: one append-only table."""

from __future__ import annotations

import csv
import fcntl
import io
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from keras_rub import tables

COLUMNS = (
    "trial", "worker", "status", "reason", "seconds", "defense", "rho",
    "learning_rate", "batch_size", "normalization", "architecture", "head",
    "steps", "split", "criterion", "norm", "radius", "accuracy",
)  # fmt: skip

_SETTINGS = (
    "defense", "rho", "learning_rate", "batch_size", "normalization",
    "architecture", "head",
)  # fmt: skip


class Results:
    """A CSV file with a row for each trial, split, criterion and radius.

    The rows of a trial are added in one write, under a lock, so several
    processes can share the file and a killed one leaves at most half a line,
    which readers skip.

    Args:
        path: the file; it is made when first written to.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds the rows of one trial."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0, os.SEEK_END)
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            else:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text.write("\n")
            writer.writerows(rows)
            file.write(text.getvalue().encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole rows; of a trial that was repeated, the last ones."""
        if not self.path.exists():
            return []
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                table = list(reader)
            if table and list(reader.fieldnames or ()) != list(COLUMNS):
                raise ValueError("its columns are other ones")
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{self.path} is no table of trials: {error}."
            ) from error
        rows = {}
        for row in table:
            try:
                for name in ("seconds", "radius", "accuracy"):
                    row[name] = float(row[name]) if row[name] else None
            except (TypeError, ValueError):
                continue
            if None in row or None in (row["trial"], row["criterion"]):
                continue
            key = tuple(
                row[name]
                for name in ("trial", "split", "criterion", "norm", "radius")
            )
            rows[key] = row
        return list(rows.values())

    def trials(self) -> dict[str, dict[str, Any]]:
        """The first row of each trial, by its number."""
        found: dict[str, dict[str, Any]] = {}
        for row in self.read():
            found.setdefault(row["trial"], row)
        return found

    def best(self, by_defense: bool = False) -> dict[tuple, dict[str, Any]]:
        """The best trial for each criterion, chosen on the validation set.

        Args:
            by_defense: bool. Whether to choose one for each defence.
                Defaults to `False`.

        Returns:
            Dict from (criterion, norm, radius), or (defense, criterion, norm,
            radius), to the row of the test set of the chosen trial, with the
            validation accuracy as `validation`.
        """
        rows = self.read()
        tests = {
            (row["trial"], *_criterion(row)): row
            for row in rows
            if row["split"] == "test"
        }
        chosen: dict[tuple, dict[str, Any]] = {}
        for row in rows:
            if row["split"] != "validation":
                continue
            key = _criterion(row)
            test = tests.get((row["trial"], *key))
            if test is None:
                continue
            if by_defense:
                key = (row["defense"], *key)
            known = chosen.get(key)
            if known is None or row["accuracy"] > known["validation"]:
                chosen[key] = {**test, "validation": row["accuracy"]}
        return chosen

    def leaderboard(self) -> str:
        """The best settings for each criterion, as a text table."""
        rows = []
        for (criterion, norm, radius), row in self.best().items():
            name = criterion if not norm else f"{criterion} L{norm} {radius:g}"
            settings = ", ".join(
                f"{key}={row[key]}" for key in _SETTINGS if row[key]
            )
            rows.append(
                (
                    name,
                    tables.percent(row["validation"]),
                    tables.percent(row["accuracy"]),
                    row["trial"],
                    settings,
                )
            )
        header = ("criterion", "validation", "test", "trial", "settings")
        lines = [tables.to_text(header, rows, left=(0, 3, 4))]
        failed = [t for t in self.trials().values() if t["status"] == "failed"]
        lines += [f"trial {t['trial']} failed: {t['reason']}" for t in failed]
        return "\n".join(lines)

    def tables(self) -> str:
        """Test accuracy as Markdown: rows defences, columns radii.

        Each cell is of the settings that were best on the validation set for
        that very cell, as the paper selects them.
        """
        best = self.best(by_defense=True)
        kinds = dict.fromkeys(key[1:3] for key in best)
        defenses = dict.fromkeys(key[0] for key in best)
        parts = []
        for criterion, norm in kinds:
            radii = sorted(
                {key[3] for key in best if key[1:3] == (criterion, norm)},
                key=lambda radius: radius or 0.0,
            )
            title = f"{criterion} L{norm}" if norm else criterion
            head = [f"{r:g}" if r is not None else "accuracy" for r in radii]
            rows = []
            for defense in defenses:
                cells = [
                    best.get((defense, criterion, norm, radius), {})
                    for radius in radii
                ]
                shares = [
                    tables.percent(cell.get("accuracy")) for cell in cells
                ]
                rows.append([defense, *shares])
            parts.append(tables.to_markdown([title, *head], rows))
        return "\n\n".join(parts)


def _criterion(row) -> tuple:
    return (row["criterion"], row["norm"], row["radius"])
