"""The folder of trained networks: where it is, and what its index says."""

from __future__ import annotations

import difflib
import os
import pathlib
from typing import Any

from keras_rub.files import digest, read_json, write_json

ENVIRONMENT_VARIABLE = "KERAS_RUB_ZOO"

# The files are in the repository, which every clone has to fetch.
MOST_FILES = 12
MOST_BYTES = 1_500_000

# What the index says of each network; "attacked" is there if "attacks" are.
FIELDS = (
    "file", "sha256", "network", "parameters", "units", "training", "recipe",
    "attacker", "radii", "method", "samples", "attacks", "attack_samples",
    "clean", "certified",
)  # fmt: skip

_INDEX = "index.json"
_OF_CLONE = pathlib.Path(__file__).parent.parent / "zoo"


def find_folder(folder: str | os.PathLike | None = None) -> pathlib.Path:
    """The folder asked for, else that of the environment, else the clone's.

    Args:
        folder: the folder, or `None`.
    """
    named = folder or os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return pathlib.Path(named).expanduser()
    if not (_OF_CLONE / _INDEX).exists():
        raise ValueError(
            "There is no zoo beside this package, because an installed one "
            "has none: name the folder zoo of a clone by `folder`, --folder or "
            f"the environment variable {ENVIRONMENT_VARIABLE}."
        )
    return _OF_CLONE


def read_index(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """All that is known of each network, by name."""
    index = read_json(folder / _INDEX)
    if not isinstance(index, dict):
        raise ValueError(f"{folder / _INDEX} holds no index of a zoo.")
    for name, entry in index.items():
        absent = [field for field in FIELDS if field not in entry]
        if absent:
            raise ValueError(
                f"{folder / _INDEX} lacks {', '.join(absent)} of {name}."
            )
    return index


def has_index(folder: pathlib.Path) -> bool:
    """Whether the folder is a zoo already."""
    return (folder / _INDEX).exists()


def write_index(folder: pathlib.Path, index: dict[str, dict[str, Any]]) -> None:
    """Writes the index anew, sorted by name."""
    write_json(folder / _INDEX, dict(sorted(index.items())), indent=2)


def find_entry(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """What the index says of one network; an error lists the names."""
    index = read_index(folder)
    if name not in index:
        near = difflib.get_close_matches(str(name), index, n=1)
        raise ValueError(
            f"Unknown network {name!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
            + f" Known: {', '.join(sorted(index))}."
        )
    return index[name]


def find_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of one network, whose checksum is that of the index."""
    entry = find_entry(folder, name)
    if entry["file"] is None:
        raise ValueError(
            f"Network {name!r} is kept by its recipe only; train it with: "
            f"{entry['recipe']}"
        )
    path = folder / entry["file"]
    if not path.exists():
        raise ValueError(f"{path} is in the index, but does not exist.")
    if digest(path) != entry["sha256"]:
        raise ValueError(
            f"{path} is damaged: its sha256 is not that of {_INDEX}. Fetch "
            "the file again."
        )
    return path
