"""Numbered folders of a model, as TensorFlow Serving polls them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator


def list_versions(folder: pathlib.Path) -> list[int]:
    """The numbers in use, in order; also those of folders with no model."""
    if not folder.is_dir():
        return []
    names = (child.name for child in folder.iterdir())
    return sorted(int(name) for name in names if name.isdecimal())


def check_version(folder: pathlib.Path, version: int | None) -> None:
    """Raises if the version is no number, or in use."""
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(
            "`version` must be a whole number of at least 1, or None for the "
            f"next free one. Received: `version={version!r}`"
        )
    if version in list_versions(folder):
        raise _taken(folder, version)


@contextlib.contextmanager
def hidden_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder that a server passes over, gone at the end.

    It lies within `folder`, on the same disk, so that `publish` is one
    rename.
    """
    hidden = folder / f".export-{uuid.uuid4().hex}"
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            "`path` must name a folder that can be written. "
            f"Received: `path={str(folder)!r}` ({error.strerror})"
        ) from error
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def publish(
    hidden: pathlib.Path, folder: pathlib.Path, version: int | None
) -> pathlib.Path:
    """Gives the finished folder its number, in one step.

    Args:
        hidden: what `hidden_folder` made, filled.
        folder: the folder of all versions.
        version: int, or `None` for the next free number.

    Returns:
        The folder of the version.
    """
    _flush(hidden)
    check_version(folder, version)
    while True:
        number = version or max(list_versions(folder), default=0) + 1
        target = folder / str(number)
        try:
            # Fails if somebody else published this number meanwhile.
            hidden.rename(target)
        except OSError:
            if number not in list_versions(folder):
                raise
            if version is not None:
                raise _taken(folder, version) from None
        else:
            return target


def _flush(folder: pathlib.Path) -> None:
    """Waits until the files are on disk: a rename may get there first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _taken(folder, version):
    return ValueError(
        f"`version` {version} of {folder} exists already and is never "
        "overwritten. Choose another, or None for the next free one. "
        f"Received: `version={version}`; in use: {list_versions(folder)}"
    )
