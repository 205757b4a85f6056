"""Files: results that are never seen half written, and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A path to write to, which takes the place of `path` at the end.

    A reader sees the old file or the new one, never half of it; if the block
    fails, the old one stays.

    Args:
        path: where the file shall be; missing folders are made.

    Yields:
        Another path in the same folder, with the same ending.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In front, since some writers look at more than the last ending.
    partial = path.with_name(f"{os.getpid()}.partial.{path.name}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: str | os.PathLike, wait: bool = True) -> Iterator[bool]:
    """A lock that one process holds at a time, on this machine or another.

    It ends with the process, however that ends. Across machines the file
    system of a shared folder has to know such locks, as NFS 4 does.

    Args:
        path: an empty file that stands for the lock; it is made, with missing
            folders, and stays.
        wait: whether to wait for the lock. Defaults to `True`.

    Yields:
        Whether the lock is held; without `wait` it may be another's.
    """
    import fcntl  # not on Windows, where the rest of this module works

    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at once, when its whole content is on disk.

    Args:
        path: where to write; missing folders are made.
        text: the new content.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(
    path: str | os.PathLike, value: Any, indent: int | None = None
) -> None:
    """Writes a value as JSON, at once; arguments as of `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file; raises one clear line if it holds none."""
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"Can't read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}.") from error


def write_figure(
    figure: Figure, path: str | os.PathLike, dpi: int = 120
) -> None:
    """Saves a matplotlib figure as PNG, at once.

    Args:
        figure: the figure.
        path: where to write; missing folders are made.
        dpi: int. Dots an inch. Defaults to `120`.
    """
    with replacing(path) as partial:
        # Without the version of matplotlib equal figures give equal files.
        figure.savefig(
            partial, format="png", dpi=dpi, metadata={"Software": None}
        )


def digest(path: str | os.PathLike) -> str:
    """A checksum of the file, or of all files of the folder."""
    path = pathlib.Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    found = hashlib.sha256()
    for file in files:
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()
