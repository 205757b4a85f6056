"""keras-tuner's oracles, made to survive lost workers and restarts."""

from __future__ import annotations

import itertools
import os
import pathlib
import threading
import time

import keras_tuner
from keras_tuner import oracles

_BEAT = 2.0  # seconds between two signs of life of a worker


class Heartbeat:
    """Shows others that this worker is alive: a file with a fresh time.

    Args:
        folder: a folder that chief and workers share.
        worker: name of this worker.
    """

    def __init__(self, folder: str | os.PathLike, worker: str):
        self._path = beat_path(folder, worker)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._path.touch()
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._stopped.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self):
        while not self._stopped.wait(_BEAT):
            self._path.touch()


def beat_path(folder: str | os.PathLike, worker: str) -> pathlib.Path:
    """Where a worker leaves its signs of life."""
    return pathlib.Path(folder) / "workers" / worker


class _Tolerant(keras_tuner.Oracle):
    """Gives the trial of a worker that has died to another one.

    keras-tuner waits for such a trial for ever. A worker counts as dead when
    its sign of life is older than `worker_timeout` seconds. Others are kept
    waiting until the last trial is done, in case they have to take it over.
    """

    worker_timeout = 60.0
    beats: str | os.PathLike | None = None

    @keras_tuner.synchronized
    def create_trial(self, tuner_id):
        self._forget_dead_workers(tuner_id)
        trial = super().create_trial(tuner_id)
        others = set(self.ongoing_trials) - {tuner_id}
        if trial.status == "STOPPED" and others:
            self.tuner_ids.add(tuner_id)
            trial.status = "IDLE"
        return trial

    def _forget_dead_workers(self, asking):
        if self.beats is None:
            return
        for worker in set(self.tuner_ids) - {asking}:
            path = beat_path(self.beats, worker)
            age = time.time() - path.stat().st_mtime if path.exists() else None
            if age is not None and age < self.worker_timeout:
                continue
            self.tuner_ids.discard(worker)
            trial = self.ongoing_trials.pop(worker, None)
            if trial is not None:
                self._retry_queue.append(trial.trial_id)


class GridOracle(_Tolerant):
    """Every combination, in order.

    Which one is next follows from those that were tried, so the search goes
    on after a restart (keras-tuner's own grid search does not).
    """

    def populate_space(self, trial_id):
        tried = {
            _key(trial.hyperparameters.values) for trial in self.trials.values()
        }
        for values in self._combinations():
            if _key(values) not in tried:
                return {"status": "RUNNING", "values": values}
        waiting = "IDLE" if self.ongoing_trials else "STOPPED"
        return {"status": waiting, "values": None}

    def _combinations(self):
        space = self.get_space()
        seen = set()
        for values in itertools.product(*(hp.values for hp in space.space)):
            space.values = {
                hp.name: value
                for hp, value in zip(space.space, values, strict=True)
            }
            active = {
                hp.name: space.values[hp.name]
                for hp in space.space
                if space.is_active(hp)
            }
            if _key(active) not in seen:
                seen.add(_key(active))
                yield active


class RandomOracle(_Tolerant, oracles.RandomSearchOracle):
    """Combinations at random."""


class BayesianOracle(_Tolerant, oracles.BayesianOptimizationOracle):
    """Combinations that a Gaussian process expects to be good."""


class HyperbandOracle(_Tolerant, oracles.HyperbandOracle):
    """Many short trials, of which the best are trained for longer."""


ORACLES = {
    "grid": GridOracle,
    "random": RandomOracle,
    "bayesian": BayesianOracle,
    "hyperband": HyperbandOracle,
}


def _key(values):
    return tuple(sorted((name, str(value)) for name, value in values.items()))
