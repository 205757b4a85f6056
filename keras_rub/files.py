"""Writing results so that a reader never sees half of them."""

from __future__ import annotations

import os
import pathlib

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
