"""Files: results that are never seen half written, and checksums."""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at once, when its whole content is on disk.

    Args:
        path: where to write; missing folders are made.
        text: the new content.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Saves a matplotlib figure as PNG; missing folders are made."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)


def digest(path: str | os.PathLike) -> str:
    """A checksum of the file, or of all files of the folder."""
    path = pathlib.Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    found = hashlib.sha256()
    for file in files:
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()
