"""The figures that the paper gives, and how it trained."""

from __future__ import annotations

import csv
import dataclasses
import pathlib

_FOLDER = pathlib.Path(__file__).parent

ATTACKED = "attacked accuracy, min of PGD and FGM"
ATTACKED_CNN = "attacked accuracy, PGD"
CERTIFIED = "certified accuracy"
ABOVE = "share of cases where the aRUB loss is above the PGD loss"

# What it trains for; for L1 times the square root of the number of features.
NUMBERS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 1.0, 3.0, 5.0, 10.0)
RATES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)

SETS = 46  # of UCI
SAMPLES = 2560  # of a table of images: its percents are multiples of 1 / 2560


@dataclasses.dataclass(frozen=True)
class Training:
    """How the paper trains.

    Attributes:
        steps: training steps.
        batch_size: samples a step.
        small_batch_size: the same of its slow defences.
    """

    steps: int
    batch_size: int
    small_batch_size: int


TABLES = Training(steps=5000, batch_size=256, small_batch_size=256)
IMAGES = Training(steps=10_000, batch_size=256, small_batch_size=32)


def table(
    dataset: str, quantity: str, norm: int | str, architecture: str = "mlp3x200"
) -> dict[str, dict[float, float]]:
    """Percents of one table, from the defence and the radius.

    Args:
        dataset: as in the paper's tables, such as `"mnist"` or `"uci46"`.
        quantity: one of the constants of this module.
        norm: 1, 2 or `"inf"`.
        architecture: `"mlp3x200"` or `"cnn"`. Defaults to `"mlp3x200"`.
    """
    wanted = (dataset, architecture, quantity, str(norm))
    found: dict[str, dict[float, float]] = {}
    for row in _read("paper_tables.csv"):
        key = tuple(
            row[name] for name in ("dataset", "architecture", "quantity")
        )
        if (*key, row["norm"]) == wanted:
            percents = found.setdefault(row["defence"], {})
            percents[float(row["rho"])] = float(row["percent"])
    return found


def speeds(data: str) -> dict[str, tuple[float, float]]:
    """Batches a second and their deviation, from the defence.

    Args:
        data: `"uci46"` or `"vision3"`.
    """
    return {
        row["defence"]: (
            float(row["batches_per_second"]),
            float(row["standard_deviation"]),
        )
        for row in _read("paper_speed.csv")
        if row["data"] == data
    }


def _read(name):
    with open(_FOLDER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
