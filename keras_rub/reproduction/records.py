"""Results of jobs as lines of JSON: one a file, or many in an archive.

A record is a dict with the `name` of the job, its `settings`, the `seconds` it
took, and the `result`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from keras_rub.files import locked, write_atomically

Record = dict[str, Any]

_KINDS: dict[str, Any] = {
    "name": str,
    "settings": dict,
    "seconds": (int, float),
    "result": dict,
}


def to_line(record: Record) -> str:
    """A record as one line; settings may hold dataclasses."""
    text = json.dumps(record, separators=(",", ":"), default=dataclasses.asdict)
    return text + "\n"


def from_line(line: bytes, where: str) -> Record:
    """The record of a line.

    Args:
        line: the line.
        where: what an error says of its place.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(
        isinstance(record.get(key), kind) for key, kind in _KINDS.items()
    ):
        raise ValueError(
            f"{where} holds no result of a job. Delete it to do it again."
        )
    return record


def same(settings: Any, kept: Any) -> bool:
    """Whether kept settings are those of a job.

    All fields of a dataclass are kept, those at their defaults too: a default
    that has changed since makes a difference. A field that has been added since
    is not among them and must stand at its default. So whoever adds a field
    gives it a default that means what was done without it. To change that
    default later is noticed in records that were made or archived in between,
    and only in these.

    Args:
        settings: of the job; values may be dataclasses.
        kept: what JSON has made of the others.
    """
    if dataclasses.is_dataclass(settings):
        fields = {field.name: field for field in dataclasses.fields(settings)}
        return (
            isinstance(kept, dict)
            and kept.keys() <= fields.keys()
            and all(
                same(getattr(settings, name), kept[name])
                if name in kept
                else getattr(settings, name) == field.default
                for name, field in fields.items()
            )
        )
    if isinstance(settings, dict):
        return (
            isinstance(kept, dict)
            and {str(key) for key in settings} == kept.keys()
            and all(same(settings[key], kept[str(key)]) for key in settings)
        )
    return json.loads(json.dumps(settings)) == kept


class Archive:
    """Records of many jobs in a folder: a file a kind, a line a job.

    The kind is the first word of a job's name. The files are sorted by name and
    made for version control: jobs that two people have done merge line by line.

    Args:
        folder: the folder; it need not exist.
        lock: the file that stands for the right to write.
    """

    def __init__(self, folder: str | os.PathLike, lock: str | os.PathLike):
        self.folder = pathlib.Path(folder)
        self._lock = lock
        self._records: dict[str, dict[str, Record]] = {}  # of each kind

    def path(self, name: str) -> pathlib.Path:
        """The file that has the record of a job."""
        return self.folder / f"{name.split('-')[0]}.jsonl"

    def get(self, name: str) -> Record | None:
        """The record of a job; a file is read once between two `add`."""
        path = self.path(name)
        if path.name not in self._records:
            self._records[path.name] = _read(path)
        return self._records[path.name].get(name)

    def add(self, records: Iterable[Record]) -> None:
        """Puts records in, in place of those of the same names."""
        files: dict[pathlib.Path, list[Record]] = {}
        for record in records:
            files.setdefault(self.path(record["name"]), []).append(record)
        with locked(self._lock):
            for path, some in files.items():
                found = _read(path)
                found.update((record["name"], record) for record in some)
                lines = [to_line(found[name]) for name in sorted(found)]
                write_atomically(path, "".join(lines))
        self._records.clear()  # as JSON has it, at the next look


def _read(path: pathlib.Path) -> dict[str, Record]:
    """The records of a file, by name; none if there is no file."""
    found: dict[str, Record] = {}
    if not path.exists():
        return found
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}, line {number},"
        record = from_line(line, where)
        if record["name"] in found:
            raise ValueError(
                f"{where} is the second one of {record['name']}. "
                "Delete one of them."
            )
        found[record["name"]] = record
    return found
