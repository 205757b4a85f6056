"""A sweep: many trainings, each scored for all attacks and radii."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import time
from typing import Any

import keras
import keras_tuner
import numpy as np

from keras_rub import datasets, training
from keras_rub.evaluation import evaluate
from keras_rub.files import replacing, write_json
from keras_rub.resuming import claim
from keras_rub.tuning.oracles import ORACLES, Heartbeat
from keras_rub.tuning.results import Results
from keras_rub.tuning.space import SearchSpace, split_defense

_HYPERBAND_EPOCHS = 27  # the longest trial of hyperband, in its own units


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep does, and where it keeps its results.

    Attributes:
        dataset: name of the data set.
        space: the search space.
        radii: dict from the norm (1, 2, `"inf"`) to the radii of the attacks.
        folder: where results, models and the tuner's state go.
        data_dir: the data folder, or `None`.
        label: column of a CSV file with the classes, or `None`, the last.
        oracle: `"grid"`, `"random"`, `"bayesian"` or `"hyperband"`.
        objective: what the oracle maximises on the validation set:
            `"mean"` of all attacked accuracies, or such as
            `"attacked:inf:0.1"` or `"certified:1:0.5"`.
        steps: training steps of a trial.
        attacks: names of attacks; a sample counts if it withstands all.
        certificates: method of `keras_rub.certify` for the norms it can do,
            or `None`.
        samples: validation and test samples that are scored.
        seed: of training and search.
    """

    dataset: str
    space: SearchSpace
    radii: dict[int | str, list[float]]
    folder: str | os.PathLike
    data_dir: str | None = None
    label: str | None = None
    oracle: str = "random"
    objective: str = "mean"
    steps: int = 300
    attacks: tuple[str, ...] = ("pgd",)
    certificates: str | None = "fast"
    samples: int = 500
    seed: int = 0

    @functools.cached_property
    def results(self) -> Results:
        """The table of all trials."""
        return Results(pathlib.Path(self.folder) / "results.csv")

    def model_path(self, trial: str) -> pathlib.Path:
        """Where the network of a trial is kept."""
        return pathlib.Path(self.folder) / "models" / f"{trial}.keras"

    def claim(self) -> None:
        """Makes the folder this sweep's own, or refuses."""
        label = {} if self.label is None else {"label": self.label}
        claim(
            self.folder,
            {
                "dataset": self.dataset,
                **label,
                "space": self.space.to_dict(),
                "radii": {str(n): list(r) for n, r in self.radii.items()},
                "oracle": self.oracle,
                "objective": self.objective,
                "steps": self.steps,
                "attacks": list(self.attacks),
                "certificates": self.certificates,
                "samples": self.samples,
                "seed": self.seed,
            },
        )

    def search(
        self,
        max_trials: int,
        max_minutes: float | None = None,
        worker_timeout: float = 60.0,
    ) -> None:
        """Runs trials, or goes on with them, until the budget is spent.

        With KERASTUNER_TUNER_ID, KERASTUNER_ORACLE_IP and
        KERASTUNER_ORACLE_PORT in the environment this process is the chief,
        which hands trials out, or a worker; all must share the folder.

        Args:
            max_trials: how many trials in all, earlier ones included.
            max_minutes: after so long no new trial is begun. Defaults to
                `None`, no limit.
            worker_timeout: seconds after which a silent worker's trial is
                given to another.
        """
        self.check_objective()
        self.claim()
        options = {
            "objective": keras_tuner.Objective("objective", "max"),
            "hyperparameters": self.space.hyperparameters(),
            "seed": self.seed,
            "max_consecutive_failed_trials": 10**9,
        }
        if self.oracle == "hyperband":
            options["max_epochs"] = _HYPERBAND_EPOCHS
        else:
            options["max_trials"] = max_trials
        oracle = ORACLES[self.oracle](**options)
        oracle.worker_timeout = worker_timeout
        tuner = _Tuner(self, oracle, max_minutes)
        worker = os.environ.get("KERASTUNER_TUNER_ID")
        try:
            if worker is None or worker == "chief":
                oracle.beats = None if worker is None else self.folder
                tuner.search(verbose=0)
            else:
                with Heartbeat(self.folder, worker):
                    tuner.search(verbose=0)
        except _OutOfTimeError:
            print("the time is up; the same command goes on later")

    def export_best(self) -> dict[str, pathlib.Path]:
        """Copies the best network for each criterion to folder/best."""
        found = {}
        for (criterion, norm, radius), row in self.results.best().items():
            name = f"{criterion}-L{norm}-{radius:g}" if norm else criterion
            source = self.model_path(row["trial"])
            if not source.exists():
                continue
            target = pathlib.Path(self.folder) / "best" / f"{name}.keras"
            for path in (source.with_suffix(".json"), source):
                if path.exists():
                    with replacing(target.with_suffix(path.suffix)) as partial:
                        shutil.copyfile(path, partial)
            found[name] = target
        return found

    def data(self, normalization: str) -> datasets.Dataset:
        """The data set in these units."""
        return _load(self.dataset, self.data_dir, normalization, self.label)

    def recipe(self, values: dict[str, Any], shape) -> training.Recipe:
        """How a trial with these hyper-parameters is trained."""
        defense, norm = split_defense(values["defense"])
        steps = self.steps
        if "tuner/epochs" in values:
            part = values["tuner/epochs"] / _HYPERBAND_EPOCHS
            steps = max(1, round(steps * part))
        return training.Recipe(
            defense=defense,
            norm=norm,
            rho=self.space.radius(values.get("rho", 0.0), norm, shape),
            architecture=values["architecture"],
            head=values["head"],
            learning_rate=values["learning_rate"],
            batch_size=values["batch_size"],
            steps=steps,
            seed=self.seed,
        )

    def score(self, model: keras.Model, x, y) -> list[dict[str, Any]]:
        """Clean, attacked and certified accuracy, for all norms and radii."""
        x, y = x[: self.samples], y[: self.samples]
        found = evaluate(
            model,
            x.reshape(len(x), *model.input_shape[1:]),
            y,
            radii=self.radii,
            norms=list(self.radii),
            attacks=self.attacks,
            certificates=self.certificates or False,
            examples=0,
            diagnosis=False,
            seed=self.seed,
            verbose=0,
        ).shares()
        rows: list[tuple[str, Any, Any, float]] = [
            ("clean", "", "", found["clean"])
        ]
        rows += [
            (criterion, norm, radius, share)
            for norm, radii in self.radii.items()
            for criterion, by_norm in (
                ("attacked", found["worst"]),
                ("certified", found["certified"]),
            )
            if str(norm) in by_norm
            for radius, share in zip(radii, by_norm[str(norm)], strict=True)
        ]
        names = ("criterion", "norm", "radius", "accuracy")
        return [
            dict(zip(names, (*row[:3], round(row[3], 6)), strict=True))
            for row in rows
        ]

    def check_objective(self) -> None:
        """Raises if `objective` names nothing that is scored."""
        if self.objective != "mean" and self._goal() is None:
            known = ["mean", "clean"]
            for norm, radii in self.radii.items():
                known += [f"attacked:{norm}:{radius:g}" for radius in radii]
                if self.certificates:
                    known += [f"certified:{norm}:{rho:g}" for rho in radii]
            raise ValueError(
                f"`objective` must be one of {', '.join(known)}. "
                f"Received: `objective={self.objective!r}`"
            )

    def objective_of(self, rows: list[dict[str, Any]]) -> float:
        """What the oracle is told, from the rows of the validation set."""
        if self.objective == "mean":
            values = [
                row["accuracy"]
                for row in rows
                if row["criterion"] == "attacked"
            ]
            return float(np.mean(values))
        goal = self._goal()
        for row in rows:
            if (row["criterion"], row["norm"], row["radius"]) == goal:
                return row["accuracy"]
        # Such as a certificate for a network that has none.
        raise keras_tuner.errors.FatalValueError(
            "`objective` must be something that can be scored for these "
            f"networks. Received: `objective={self.objective!r}`"
        )

    def _goal(self) -> tuple[str, Any, Any] | None:
        """Criterion, norm and radius of `objective`, if they are scored."""
        if self.objective == "clean":
            return ("clean", "", "")
        for norm, radii in self.radii.items():
            for radius in radii:
                for criterion in ("attacked", "certified"):
                    with contextlib.suppress(ValueError):
                        name, other, number = self.objective.split(":")
                        if (
                            name == criterion
                            and other == str(norm)
                            and float(number) == radius
                            and (name == "attacked" or self.certificates)
                        ):
                            return (criterion, norm, radius)
        return None


@functools.lru_cache(maxsize=4)
def _load(name, data_dir, normalization, label):
    return datasets.load(
        name, data_dir, normalization=normalization, label=label
    )


class _OutOfTimeError(Exception):
    """The time budget is spent."""


class _Hopeless(keras.callbacks.Callback):
    """Stops a training that is no better than chance when half is over."""

    def __init__(self, data, epochs):
        super().__init__()
        counts = np.bincount(data.validation[1])
        self._chance = counts.max() / counts.sum()
        self._half = epochs // 2
        self.stopped = False

    def on_epoch_end(self, epoch, logs=None):
        accuracy = (logs or {}).get("val_accuracy", 1.0)
        # A little more than chance is chance, too.
        if epoch + 1 == self._half and accuracy <= self._chance + 0.01:
            self.model.stop_training = self.stopped = True


class _Tuner(keras_tuner.Tuner):
    """Trains and scores one trial after another."""

    def __init__(self, sweep: Sweep, oracle, max_minutes):
        self._sweep = sweep
        self._end = (
            None if max_minutes is None else time.time() + 60 * max_minutes
        )
        super().__init__(
            oracle=oracle,
            directory=str(sweep.folder),
            project_name="tuner",
        )

    def pre_create_trial(self):
        if self._end is not None and time.time() > self._end:
            raise _OutOfTimeError
        time.sleep(0.2)  # a worker that is told to wait asks again at once

    def run_trial(self, trial, **kwargs):
        values = dict(trial.hyperparameters.values)
        start = time.time()
        row = {
            "trial": trial.trial_id,
            "worker": self.tuner_id,
            **{key: values.get(key, "") for key in _KEPT},
        }
        try:
            rows, objective = self._train_and_score(trial.trial_id, values)
        except keras_tuner.errors.FatalError:
            raise
        except Exception as error:  # any failure is the trial's own
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rows, objective = [{"status": "failed", "reason": reason}], None
        seconds = round(time.time() - start, 1)
        self._sweep.results.add(
            {"status": "done", **row, "seconds": seconds, **found}
            for found in rows
        )
        self._show(trial.trial_id, values, rows, objective, seconds)
        if objective is None:
            raise keras_tuner.errors.FailedTrialError(rows[0]["reason"])
        return {"objective": objective}

    def _train_and_score(self, trial, values):
        sweep = self._sweep
        keras.backend.clear_session()
        data = sweep.data(values["normalization"])
        recipe = sweep.recipe(values, data.input_shape)
        model = recipe.build(data)
        hopeless = _Hopeless(data, recipe.epochs)
        history = recipe.fit(
            model,
            data,
            [keras.callbacks.TerminateOnNaN(), hopeless],
            verbose=0,
        ).history
        if not np.all(np.isfinite(history["loss"])):
            raise ArithmeticError("the loss became NaN or infinite")
        base = getattr(model, "base", model)
        rows = []
        for split in ("validation", "test"):
            found = sweep.score(base, *getattr(data, split))
            rows += [
                {
                    **row,
                    "split": split,
                    "steps": recipe.steps,
                    "reason": "stopped early" if hopeless.stopped else "",
                }
                for row in found
            ]
        path = sweep.model_path(trial)
        settings = training.settings_of(recipe, data)
        write_json(path.with_suffix(".json"), settings, indent=2)
        training.save(model, path)
        validation = [row for row in rows if row["split"] == "validation"]
        return rows, sweep.objective_of(validation)

    def _show(self, trial, values, rows, objective, seconds):
        settings = ", ".join(
            f"{key}={values[key]}" for key in _KEPT if key in values
        )
        what = rows[0]["reason"] if objective is None else f"{objective:.1%}"
        total = self.oracle.max_trials
        left = ""
        if total:
            done = len(self._sweep.results.trials())
            left = f" [{done}/{total}]"
        print(
            f"trial {trial}{left} {settings}: {what} ({seconds:.0f} s)",
            flush=True,
        )


_KEPT = (
    "defense", "rho", "learning_rate", "batch_size", "normalization",
    "architecture", "head",
)  # fmt: skip
