"""What every experiment is given."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import app
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_rub import datasets
from keras_rub.datasets.dataset import RawData, prepare
from reproduction import jobs


@dataclasses.dataclass
class Context:
    """Budget, data and folders of one run.

    Attributes:
        budget: `"smoke"`, `"laptop"` or `"full"`.
        data_dir: the data folder, or `None`.
        out: folder for models and job results.
        results: folder for pages.
        command: the command line that makes the page NAME, with `{name}`.
        minutes: start no job after so many minutes, or `None`.
        train: whether networks that are missing may be trained.
    """

    budget: str
    data_dir: str | os.PathLike | None
    out: pathlib.Path
    results: pathlib.Path
    command: str
    minutes: float | None = None
    train: bool = True

    def __post_init__(self):
        self.store = jobs.Store(self.out / "jobs")
        self.models: dict[pathlib.Path, Any] = {}
        # A standardised image set takes 190 MB: keep two at most.
        self.load = functools.lru_cache(maxsize=2)(self._load)

    def do(self, todo: Iterable[jobs.Job]) -> dict[str, dict[str, Any]]:
        """Runs jobs; returns the results of all that are finished."""
        todo = list(todo)
        jobs.run(todo, self.store, self.minutes)
        found = {job.name: self.store.read(job) for job in todo}
        return {name: value for name, value in found.items() if value}

    def _load(self, name: str, normalization: str = "default"):
        if name == "digits":
            return prepare(name, _digit_images(), normalization, 200)
        try:
            return datasets.load(
                name, self.data_dir, normalization=normalization
            )
        except ValueError as error:
            raise app.UsageError(str(error)) from error


def _digit_images() -> RawData:
    """The embedded digits as images of 8 x 8 bytes."""
    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    x, test_x, y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0
    )
    return RawData((x, y), (test_x, test_y), source="scikit-learn")
