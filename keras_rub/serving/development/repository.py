"""Which versions are served: loads new ones, drains old ones."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from keras_rub.serving.development.servable import Servable
from keras_rub.serving.development.status import RequestError
from keras_rub.serving.versions import list_versions


class Record(NamedTuple):
    """What is said of one version: its state, and why it failed if it did.

    The states are those of TensorFlow Serving: LOADING, AVAILABLE, UNLOADING
    and END.
    """

    state: str
    error: str = ""


class ModelConfig(NamedTuple):
    """What to serve under one name.

    Attributes:
        folder: where its numbered versions lie.
        chosen: from the numbers there to those that shall be served.
        labels: names of versions.
    """

    folder: pathlib.Path
    chosen: Callable[[list[int]], list[int]]
    labels: dict[str, int]


class Repository:
    """The models of a server and their versions.

    A new version takes over when it is loaded and warm; the old one answers
    until then, ends the requests that it has, and is let go. A version that
    can't be loaded is passed over.

    Args:
        read_config: returns what to serve, by name. It is asked at every
            look at the disk.
    """

    def __init__(self, read_config: Callable[[], dict[str, ModelConfig]]):
        self._read_config = read_config
        self._changed = threading.Condition()
        self._config: dict[str, ModelConfig] = {}
        self._loaded: dict[str, dict[int, Servable]] = {}
        self._requests: dict[Servable, int] = {}
        self._records: dict[str, dict[int, Record]] = {}

    def refresh(self) -> None:
        """Looks at the disk once, and loads and drains what has changed."""
        config = self._read_config()
        with self._changed:
            self._config = config
            for name in config:
                self._records.setdefault(name, {})
        for name, model in config.items():
            wanted = model.chosen(list_versions(model.folder))
            for version in wanted:
                self._load(name, version, model.folder / str(version))
            loaded = self._loaded.get(name, {})
            ready = [version for version in wanted if version in loaded]
            # An old version stays while none of the new ones can answer.
            if ready or not wanted:
                for version in [v for v in loaded if v not in wanted]:
                    self._drain(name, version)
        for name in [name for name in self._loaded if name not in config]:
            for version in list(self._loaded[name]):
                self._drain(name, version)

    @contextlib.contextmanager
    def use(
        self, name: str, version: int | None = None, label: str | None = None
    ) -> Iterator[Servable]:
        """The version that answers a request, kept until it is answered.

        Args:
            name: of the model.
            version: its number, or `None` for the newest one.
            label: in the place of a number, or `None`.
        """
        with self._changed:
            servable = self._find(name, version, label)
            self._requests[servable] = self._requests.get(servable, 0) + 1
        try:
            yield servable
        finally:
            with self._changed:
                self._requests[servable] -= 1
                self._changed.notify_all()

    def records(
        self, name: str, version: int | None = None, label: str | None = None
    ) -> dict[int, Record]:
        """The states of all versions of a model, or of one of them."""
        with self._changed:
            if label is not None:
                version = self._labelled(name, label)
            found = dict(self._records.get(name, {}))
        if version is not None:
            found = {v: r for v, r in found.items() if v == version}
        if not found:
            which = "any versions" if version is None else f"version {version}"
            raise RequestError(
                "NOT_FOUND", f"Could not find {which} of model {name}"
            )
        return dict(sorted(found.items(), reverse=True))

    def names(self) -> dict[str, list[int]]:
        """The models that can answer, with their versions."""
        with self._changed:
            return {
                name: sorted(versions)
                for name, versions in self._loaded.items()
                if versions
            }

    def _find(self, name, version, label) -> Servable:
        loaded = self._loaded.get(name, {})
        if label is not None:
            version = self._labelled(name, label)
        if version is None and loaded:
            version = max(loaded)
        if version not in loaded:
            asked = (
                f"Latest({name})"
                if version is None
                else f"Specific({name}, {version})"
            )
            raise RequestError(
                "NOT_FOUND", f"Servable not found for request: {asked}"
            )
        return loaded[version]

    def _labelled(self, name, label) -> int:
        config = self._config.get(name)
        if config is None or label not in config.labels:
            raise RequestError(
                "INVALID_ARGUMENT",
                f"Unrecognized servable version label: {label}",
            )
        return config.labels[label]

    def _load(self, name, version, folder) -> None:
        known = self._records[name].get(version)
        if known is not None and known.state != "END":
            return
        if known is not None and known.error:
            return  # it would fail again: a version never changes
        self._note(name, version, Record("LOADING"))
        try:
            servable = Servable(name, version, folder)
        # Whatever a broken model raises, the others go on.
        except Exception as error:
            self._note(name, version, Record("END", str(error)))
            return
        with self._changed:
            self._loaded.setdefault(name, {})[version] = servable
        self._note(name, version, Record("AVAILABLE"))

    def _drain(self, name, version) -> None:
        with self._changed:
            servable = self._loaded[name].pop(version)
            self._records[name][version] = Record("UNLOADING")
            self._changed.wait_for(lambda: not self._requests.get(servable))
            self._requests.pop(servable, None)
            self._records[name][version] = Record("END")

    def _note(self, name, version, record: Record) -> None:
        with self._changed:
            self._records[name][version] = record


def newest(count: int) -> Callable[[list[int]], list[int]]:
    """The policy that serves the newest versions."""
    return lambda versions: versions[-count:]


def model_config(entry: Any, folder: pathlib.Path) -> ModelConfig:
    """One entry of models.config.

    Args:
        entry: its protocol buffer.
        folder: its base path, as this machine sees it.
    """
    policy = entry.model_version_policy
    chosen = newest(policy.latest.num_versions or 1)
    if policy.HasField("all"):
        chosen = list
    elif policy.HasField("specific"):
        numbers = set(policy.specific.versions)

        def chosen(versions):
            return [version for version in versions if version in numbers]

    return ModelConfig(folder, chosen, dict(entry.version_labels))
