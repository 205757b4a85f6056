"""Jobs in other processes, of this machine or of many: a Dask cluster."""

from __future__ import annotations

import concurrent.futures
import logging
import random
import sys
import time
from typing import Any

from keras_rub.reproduction.jobs import Job, LostError

# Small networks: more threads only wait for each other.
_ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}

_LOOK = 5.0  # seconds between two looks at who has joined
_PATIENCE = 120.0  # seconds to go on without any worker


class Cluster:
    """Does jobs on the workers of a Dask scheduler.

    Nothing is started before the first job. The job of a worker that dies is
    done again by another one, but not for ever.

    Args:
        processes: how many workers to start on this machine, or
        scheduler: the address of a scheduler that has workers.
    """

    def __init__(
        self, processes: int | None = None, scheduler: str | None = None
    ):
        if (processes is None) == (scheduler is None):
            raise ValueError(
                "Give one of `processes` and `scheduler`. Received: "
                f"`processes={processes}`, `scheduler={scheduler!r}`"
            )
        try:
            import dask
            import distributed
        except ImportError as error:
            raise ValueError(
                "Jobs in other processes need Dask, the extra `cluster`: "
                "pip install 'keras-rub[cluster]'. Without it: --processes=1."
            ) from error
        self._dask = distributed
        self._dask_config = dask.config
        self._processes = processes
        self._scheduler = scheduler
        self._own: Any = None
        self._client: Any = None
        self._seen = 0.0  # when there was a worker last

    def outcomes(self, jobs):
        """See `Engine`."""
        running: dict[Any, Job] = {}
        try:
            for job in jobs:
                running[self._submit(job)] = job
                while len(running) >= max(1, self._workers()):
                    yield from self._finished(running)
            while running:
                yield from self._finished(running)
        finally:
            if running and self._client is not None:  # not closed yet
                self._client.cancel(list(running), force=True)

    def close(self) -> None:
        """Ends the connection, and the workers that were started."""
        for part in (self._client, self._own):
            if part is not None:
                part.close()
        self._client = self._own = None

    def _submit(self, job):
        if self._client is None:
            self._start()
        work = job.work

        # Defined here it is sent as it is: a worker imports what the work
        # needs, and no more.
        def timed():
            # Keras takes its seeds from Python's generator, of which Dask's
            # threads draw meanwhile, to guess sizes: they get their own.
            for name, module in list(sys.modules.items()):
                if (
                    name.split(".")[0] in ("dask", "distributed", "tornado")
                    and getattr(module, "random", None) is random
                ):
                    vars(module)["random"] = random.Random()
            start = time.monotonic()
            result = work()
            return result, time.monotonic() - start

        return self._client.submit(timed, pure=False)

    def _start(self):
        # absl shows what it would keep to itself; `run` tells what matters.
        logging.getLogger("distributed").setLevel(logging.ERROR)
        if self._scheduler is None:
            # A worker that died is given up if it isn't back by then; one that
            # imports TensorFlow on a busy machine takes longer than the usual
            # 15 s.
            self._dask_config.set(
                {"distributed.deploy.lost-worker-timeout": _PATIENCE}
            )
            self._own = self._dask.LocalCluster(
                n_workers=self._processes,
                threads_per_worker=1,
                memory_limit=None,  # Dask would end workers by a guess
                # Any port: two commands may share the machine.
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,  # a failed job is raised here
                env=_ONE_THREAD,
            )
        self._client = self._dask.Client(self._own or self._scheduler)
        self._seen = time.monotonic()

    def _workers(self) -> int:
        """How many there are now, each with one thread."""
        threads = self._client.nthreads()
        if threads:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _PATIENCE:
            raise TimeoutError(
                f"The scheduler {self._client.scheduler.address} had no worker "
                f"for {_PATIENCE:.0f} s."
            )
        if any(count != 1 for count in threads.values()):
            # Keras keeps its seed and its graphs by process.
            raise ValueError(
                "Workers must have one thread each: dask worker --nthreads=1. "
                f"Received: {max(threads.values())} threads"
            )
        return len(threads)

    def _finished(self, running):
        """Those that end within a short time; `running` loses them."""
        self._workers()
        try:
            done = self._dask.wait(
                list(running), timeout=_LOOK, return_when="FIRST_COMPLETED"
            ).done
        except TimeoutError:
            return
        for future in done:
            yield (
                running.pop(future),
                lambda future=future: self._result(future),
            )

    def _result(self, future):
        try:
            return future.result()
        except self._dask.KilledWorker as error:
            raise LostError(
                f"{error.allowed_failures + 1} workers died of it, perhaps "
                "for want of memory"
            ) from error
        except concurrent.futures.CancelledError as error:
            raise ConnectionError(
                f"The scheduler {self._scheduler} is gone."
            ) from error
