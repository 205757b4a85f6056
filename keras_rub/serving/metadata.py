"""What `keras_rub.export` notes about a model, within its SavedModel."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from keras_rub.files import read_json
from keras_rub.serving.versions import list_versions

# Where the facts lie.
METADATA = pathlib.Path("assets.extra") / "metadata.json"


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """What `keras_rub.export` noted about a model.

    Args:
        path: the folder of a SavedModel, or one with numbered versions, of
            which the newest is taken.

    Returns:
        Dict with the versions of the libraries, the time of the export, the
        defence and the radius of the training, the shapes, the signatures,
        the settings of the certificates, and what the user added.
    """
    folder = pathlib.Path(path)
    versions = list_versions(folder)
    if versions and not (folder / METADATA).exists():
        folder /= str(versions[-1])
    if not (folder / METADATA).exists():
        raise ValueError(
            f"{folder} was not written by keras_rub.export: it has no "
            f"{METADATA}."
        )
    facts = read_json(folder / METADATA)
    if not isinstance(facts, dict):
        raise ValueError(
            f"{folder / METADATA} holds no facts about a model. Received: "
            f"{type(facts).__name__}"
        )
    return facts
