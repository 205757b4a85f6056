"""Small named pieces of work whose results are kept as JSON files."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from keras_rub.files import read_json, write_json
from keras_rub.resuming import differing


class NotNowError(Exception):
    """Raised by a job that can't be done at present; says why."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        name: of its file; unique.
        settings: everything that decides the result, ready for JSON.
        work: does it and returns a dict that is ready for JSON.
    """

    name: str
    settings: dict[str, Any]
    work: Callable[[], dict[str, Any]]


class Store:
    """The results of jobs, one JSON file each.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder)

    def path(self, job: Job) -> pathlib.Path:
        """Where the result of a job is kept."""
        return self.folder / f"{job.name}.json"

    def read(self, job: Job) -> dict[str, Any] | None:
        """The result, or `None` if there is none of these settings."""
        path = self.path(job)
        if not path.exists():
            return None
        state = read_json(path)
        if not isinstance(state, dict) or not all(
            isinstance(state.get(key), dict) for key in ("settings", "result")
        ):
            raise ValueError(
                f"{path} holds no result of a job. Delete it to do it again."
            )
        if differing(job.settings, state["settings"]):
            return None
        return state["result"]

    def write(self, job: Job, result: dict[str, Any], seconds: float) -> None:
        """Keeps a result; a reader never sees half of it."""
        state = {
            "settings": job.settings,
            "seconds": round(seconds, 1),
            "result": result,
        }
        write_json(self.path(job), state)


def run(
    jobs: Iterable[Job], store: Store, minutes: float | None = None
) -> None:
    """Does the jobs that are not done yet, one after another.

    Args:
        jobs: the jobs; of equal names the first counts.
        store: where results are kept.
        minutes: start no job after so many minutes; `None` for no limit.
    """
    jobs = list({job.name: job for job in reversed(list(jobs))}.values())[::-1]
    left = [job for job in jobs if store.read(job) is None]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done already")
    begin = time.monotonic()
    for number, job in enumerate(left):
        start = time.monotonic()
        if minutes is not None and start - begin >= 60 * minutes:
            print(f"time is up: {len(left) - number} jobs left")
            return
        if store.read(job) is not None:  # done by another process meanwhile
            continue
        try:
            result = job.work()
        except NotNowError as reason:
            print(f"{job.name}: left out, {reason}", flush=True)
            continue
        end = time.monotonic()
        store.write(job, result, end - start)
        ahead = (end - begin) / (number + 1) * (len(left) - number - 1)
        print(
            f"[{len(jobs) - len(left) + number + 1}/{len(jobs)}] {job.name}: "
            f"{end - start:.1f} s, about {_duration(ahead)} left",
            flush=True,
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
