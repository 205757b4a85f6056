"""What every experiment is given."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np

from keras_rub import datasets
from keras_rub.datasets.dataset import RawData, prepare
from keras_rub.reproduction import jobs

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass
class Context:
    """Budget, data and folders of one run.

    Attributes:
        budget: `"smoke"`, `"laptop"` or `"full"`.
        data_dir: the data folder, or `None`.
        out: folder for models and job results.
        results: folder for pages.
        minutes: start no job after so many minutes, or `None`.
        train: whether networks that are missing may be trained.
        engine: what does the jobs; `None` for this process.
    """

    budget: str
    data_dir: str | os.PathLike | None
    out: pathlib.Path
    results: pathlib.Path
    minutes: float | None = None
    train: bool = True
    engine: jobs.Engine | None = None

    def __post_init__(self):
        self.store = jobs.Store(
            self.out / "jobs",
            archive=self.results / "jobs" / self.budget,
        )
        self._asked: dict[str, jobs.Job] = {}
        self.models: dict[Hashable, Any] = {}
        # A standardised image set takes 190 MB: keep two at most.
        self.load = functools.lru_cache(maxsize=2)(self._load)

    def do(
        self, todo: dict[Key, jobs.Job], alone: bool = False
    ) -> dict[Key, dict[str, Any]]:
        """Runs jobs; returns the results of all that are finished.

        Args:
            todo: the jobs, by any key; the results have the same.
            alone: whether each wants the machine for itself: this process
                then does them. Defaults to `False`.
        """
        engine = None if alone else self.engine
        jobs.run(todo.values(), self.store, self.minutes, engine)
        self._asked.update((job.name, job) for job in todo.values())
        found = {key: self.store.read(job) for key, job in todo.items()}
        return {key: value for key, value in found.items() if value}

    def archive(self) -> None:
        """Puts what `do` was asked for and is finished into the archive."""
        self.store.archive(self._asked.values())

    def __reduce__(self):
        return _in_worker, (
            self.budget,
            self.data_dir and pathlib.Path(self.data_dir).absolute(),
            self.out.absolute(),
            self.results.absolute(),
            self.minutes,
            self.train,
        )

    def _load(self, name: str, normalization: str = "default"):
        if name == "digits":
            return prepare(name, _digit_images(), normalization, 32)
        return datasets.load(name, self.data_dir, normalization=normalization)


@functools.lru_cache(maxsize=1)
def _in_worker(*fields) -> Context:
    """The context of another process, with its data and models kept here."""
    return Context(*fields)


def _digit_images() -> RawData:
    """The embedded digits as images of 8 x 8 bytes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    x, test_x, y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0
    )
    return RawData((x, y), (test_x, test_y), source="scikit-learn")
