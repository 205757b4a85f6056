"""Small named pieces of work whose results are kept."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from keras_rub.files import write_atomically
from keras_rub.reproduction.records import (
    Archive,
    Record,
    from_line,
    same,
    to_line,
)


class NotNowError(Exception):
    """Raised by a job that can't be done at present; says why."""


class LostError(Exception):
    """Raised in place of a result whose process ended again and again."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        name: of its file; unique.
        settings: everything that decides the result, ready for JSON but for
            dataclasses; `keras_rub.reproduction.records.same` compares them.
        work: does it and returns a dict that is ready for JSON.
    """

    name: str
    settings: dict[str, Any]
    work: Callable[[], dict[str, Any]]


class Store:
    """The results of jobs: a file each, and an archive of many.

    Args:
        folder: where the files are.
        archive: a folder for version control, which is read where a job has
            no file of its own. Defaults to `None`, no archive.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        archive: str | os.PathLike | None = None,
    ):
        self.folder = pathlib.Path(folder)
        self._archive = (
            None
            if archive is None
            else Archive(archive, lock=self.folder / "archive.lock")
        )

    def path(self, job: Job) -> pathlib.Path:
        """Where the result of a job is kept."""
        return self.folder / f"{job.name}.json"

    def read(self, job: Job) -> dict[str, Any] | None:
        """The result, or `None` if there is none of these settings."""
        record = self._record(job)
        return None if record is None else record["result"]

    def write(self, job: Job, result: dict[str, Any], seconds: float) -> None:
        """Keeps a result; a reader never sees half of it."""
        record = {
            "name": job.name,
            "settings": job.settings,
            "seconds": round(seconds, 1),
            "result": result,
        }
        write_atomically(self.path(job), to_line(record))

    def archive(self, jobs: Iterable[Job]) -> None:
        """Puts the results of those jobs that are done into the archive.

        They get the present settings, with the fields that were added since.
        """
        if self._archive is None:
            return
        pairs = ((job, self._record(job)) for job in jobs)
        self._archive.add(
            [
                {**found, "settings": job.settings}
                for job, found in pairs
                if found
            ]
        )

    def _record(self, job: Job) -> Record | None:
        path = self.path(job)
        records = [
            from_line(path.read_bytes(), str(path)) if path.exists() else None,
            self._archive.get(job.name) if self._archive else None,
        ]
        for record in records:
            if record is not None and same(job.settings, record["settings"]):
                return record
        return None


class Engine(Protocol):
    """What does jobs, in this process or in others."""

    def outcomes(
        self, jobs: Iterable[Job]
    ) -> Iterator[tuple[Job, Callable[[], tuple[dict[str, Any], float]]]]:
        """Pairs of a job and what gives its result and seconds, or raises.

        Args:
            jobs: those to do. Each is asked for when it can be started.
        """

    def close(self) -> None:
        """Ends what was started."""


class Here:
    """Does jobs in this process, one after another."""

    def outcomes(self, jobs):
        """See `Engine`; a job is done when its result is asked for."""
        for job in jobs:
            yield job, functools.partial(_timed, job.work)

    def close(self) -> None:
        """There is nothing to end."""


def _timed(work):
    start = time.monotonic()
    result = work()
    return result, time.monotonic() - start


def run(
    jobs: Iterable[Job],
    store: Store,
    minutes: float | None = None,
    engine: Engine | None = None,
) -> None:
    """Does the jobs that are not done yet; they must not need each other.

    Every result is kept as soon as it is there.

    Args:
        jobs: the jobs; of equal names the first counts.
        store: where results are kept.
        minutes: start no job after so many minutes; `None` for no limit.
        engine: what does them. Defaults to `None`, this process.

    Raises:
        ChildProcessError: after all others are done, if the processes that
            did a job ended again and again.
    """
    jobs = list({job.name: job for job in reversed(list(jobs))}.values())[::-1]
    left = [job for job in jobs if store.read(job) is None]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done already")
    begin = time.monotonic()
    lost = []

    def startable():
        for number, job in enumerate(left):
            if minutes is not None and time.monotonic() - begin >= 60 * minutes:
                print(f"time is up: {len(left) - number} jobs left")
                return
            if store.read(job) is None:  # not done by others meanwhile
                yield job

    outcomes = (engine or Here()).outcomes(startable())
    for number, (job, outcome) in enumerate(outcomes, start=1):
        try:
            result, seconds = outcome()
        except (NotNowError, LostError) as reason:
            print(f"{job.name}: left out, {reason}", flush=True)
            if isinstance(reason, LostError):
                lost.append(f"{job.name}: {reason}")
            continue
        store.write(job, result, seconds)
        spent = time.monotonic() - begin
        ahead = spent / number * max(len(left) - number, 0)
        print(
            f"[{len(jobs) - len(left) + number}/{len(jobs)}] {job.name}: "
            f"{seconds:.1f} s, about {_duration(ahead)} left",
            flush=True,
        )
    if lost:
        raise ChildProcessError("; ".join(lost))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
