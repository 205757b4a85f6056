"""One way to train a network, shared by the command-line tools."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_rub import defenses, distribution, models
from keras_rub.datasets import Dataset
from keras_rub.defenses.robust_model import count_or_all
from keras_rub.files import read_json, replacing, write_atomically
from keras_rub.perturbations import (
    PerturbationSet,
    canonical_norm,
    check_rho,
)
from keras_rub.resuming import claim

DEFENSES = {
    "nominal": None,
    "baseline": defenses.BaselineModel,
    "fgsm": defenses.FGSMModel,
    "pgd": defenses.PGDModel,
    "arub": defenses.ARUBModel,
    "rub": defenses.RUBModel,
    "coap": defenses.COAPModel,
    "ibp": defenses.IBPModel,
}

ARCHITECTURES: dict[str, Callable[..., keras.Model]] = {
    "mlp": models.mlp,
    "mlp1": functools.partial(models.mlp, hidden=(200,)),
    "wide_mlp": functools.partial(models.mlp, hidden=(512, 512, 512)),
    "cnn": models.cnn,
    "small_cnn": models.small_cnn,
    "wide_cnn": functools.partial(
        models.small_cnn, filters=(32, 64), units=256
    ),
}

# How a network ends: as logits or probabilities of all classes, or as one
# probability, where there are two.
HEADS = ("logits", "softmax", "sigmoid")

# Defences whose bound or attack can respect the valid range.
_WITH_RANGE = ("fgsm", "pgd", "rub", "coap", "ibp")

# Fields of `Recipe` that settings of the first version lack.
ADDED = {"shift": 0, "flip": False}

_EPOCHS = 20  # how often progress is saved and shown


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides how a network is trained.

    Attributes:
        defense: one of `DEFENSES`.
        norm: 1, 2 or `"inf"`; rub knows 1 only.
        rho: the radius, in the units that the network sees.
        rho_ramp: part of the training over which the radius grows from 0.
        input_range: the valid inputs, which the attacker can't leave: a pair
            `(low, high)`, or whether to take the data set's own range.
        mix: the weight of the robust loss against the clean one.
        vertices: with rub, vertices a sample to evaluate.
        competitors: with rub and arub, competing classes a sample that a
            step looks at: a number, or `"all"`.
        attack_steps: with pgd, and with ibp where `bound_weight` is below 1,
            gradient steps of the attack.
        bound: with ibp, `"ibp"` or `"crown-ibp"`.
        bound_weight: with ibp, the weight of the bound against the attack.
        architecture: one of `ARCHITECTURES`.
        head: one of `HEADS`; sigmoid is one output, for two classes.
        learning_rate: of Adam, at the start of a cosine decay.
        weight_decay: decoupled weight decay of Adam.
        batch_size: samples a step.
        steps: number of training steps.
        shift: pixels by which training images are moved at most, in either
            direction.
        flip: whether training images are mirrored at random.
        seed: of the weights, of the shuffling, the shifts and the flips.
    """

    defense: str = "rub"
    norm: int | str = 1
    rho: float = 1.0
    rho_ramp: float = 0.5
    input_range: bool | tuple[float, float] = False
    mix: float = 1.0
    vertices: int = 32
    competitors: int | str = 1
    attack_steps: int = 10
    bound: str = "ibp"
    bound_weight: float = 1.0
    architecture: str = "mlp"
    head: str = "logits"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 128
    steps: int = 2000
    shift: int = 0
    flip: bool = False
    seed: int = 0

    def __post_init__(self):
        _choose("defense", self.defense, DEFENSES)
        _choose("architecture", self.architecture, ARCHITECTURES)
        _choose("head", self.head, HEADS)
        canonical_norm(self.norm)
        check_rho(self.rho)
        count_or_all("competitors", self.competitors)
        if self.defense == "rub" and self.norm != 1:
            raise ValueError(
                f"Defence rub is for norm 1 only. Received: `norm={self.norm}`"
            )
        if self.input_range and self.defense not in _WITH_RANGE:
            raise ValueError(
                f"Defence {self.defense} can't respect a valid range; "
                f"{', '.join(_WITH_RANGE)} can."
            )
        if not isinstance(self.input_range, bool):
            PerturbationSet(self.norm, input_range=self.input_range)
        if not 0.0 <= self.rho_ramp <= 1.0:
            raise ValueError(
                "`rho_ramp` must be between 0 and 1. "
                f"Received: `rho_ramp={self.rho_ramp}`"
            )
        for name in ("batch_size", "steps", "vertices", "attack_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1. "
                    f"Received: `{name}={getattr(self, name)}`"
                )
        if self.shift < 0:
            raise ValueError(
                f"`shift` must be at least 0. Received: `shift={self.shift}`"
            )
        for name in ("mix", "bound_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(
                    f"`{name}` must be between 0 and 1. "
                    f"Received: `{name}={getattr(self, name)}`"
                )
        _choose("bound", self.bound, defenses.IBP_BOUNDS)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                "`learning_rate` must be finite and above 0. "
                f"Received: `learning_rate={self.learning_rate}`"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                "`weight_decay` must be finite and at least 0. "
                f"Received: `weight_decay={self.weight_decay}`"
            )

    @property
    def epochs(self) -> int:
        """Parts of the training between which progress is saved."""
        return min(_EPOCHS, self.steps)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one such part; the last one is filled up."""
        return -(-self.steps // self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """The settings, ready for JSON."""
        return dataclasses.asdict(self)

    def build(self, data: Dataset) -> keras.Model:
        """The network in its defence, compiled and untrained."""
        keras.utils.set_random_seed(self.seed)
        model = self._wrap(self._network(data), data)
        total = self.epochs * self.steps_per_epoch
        model.compile(
            optimizer=keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(
                    self.learning_rate, total
                ),
                weight_decay=self.weight_decay or None,
                global_clipnorm=5.0,
            ),
            loss=(
                keras.losses.BinaryCrossentropy()
                if self.head == "sigmoid"
                else keras.losses.SparseCategoricalCrossentropy(
                    from_logits=self.head == "logits"
                )
            ),
            metrics=["accuracy"],
        )
        return model

    def _network(self, data):
        make = ARCHITECTURES[self.architecture]
        if data.scales_inside:
            make = functools.partial(make, preprocessing=data.preprocessing())
        if self.head == "logits":
            return make(data.input_shape, data.num_classes)
        one = self.head == "sigmoid"
        if one and data.num_classes != 2:
            raise ValueError(
                f"One output is for two classes; {data.name} has "
                f"{data.num_classes}. Received: `head={self.head!r}`"
            )
        base = make(data.input_shape, 1 if one else data.num_classes)
        base.add(keras.layers.Activation(self.head))
        return base

    def fit(
        self,
        model: keras.Model,
        data: Dataset,
        callbacks: list[keras.callbacks.Callback] | None = None,
        verbose: int | str = 2,
        done: int = 0,
    ) -> keras.callbacks.History:
        """Trains a model that `build` made, from epoch `done` on."""
        # A robust loss is dear, and here every competitor counts: of the
        # samples that an epoch trains on, a twentieth.
        seen = self.steps_per_epoch * self.batch_size // 20
        seen = min(1000, max(200, seen))
        return model.fit(
            self.batches(data).skip(done * self.steps_per_epoch),
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            initial_epoch=done,
            validation_data=tuple(part[:seen] for part in data.validation),
            verbose=verbose,
            callbacks=callbacks,
            shuffle=False,  # `batches` has done it
        )

    def batches(self, data: Dataset) -> tf.data.Dataset:
        """What is trained on, for ever."""
        return data.batches(
            "train",
            self.batch_size,
            repeat=True,
            shift=self.shift,
            flip=self.flip,
            seed=self.seed,
        )

    def _wrap(self, base, data):
        wrapper = DEFENSES[self.defense]
        if wrapper is None:
            return base
        rho = self.rho
        ramp = round(self.rho_ramp * self.epochs * self.steps_per_epoch)
        if ramp:
            rho = keras.optimizers.schedules.PolynomialDecay(0.0, ramp, rho)
        options: dict[str, Any] = {}
        if self.defense == "rub":
            options["vertices"] = self.vertices
        else:
            options["norm"] = self.norm
        if self.defense in ("rub", "arub"):
            options["competitors"] = self.competitors
        if self.defense == "pgd":
            options["steps"] = self.attack_steps
        if self.defense == "ibp":
            options["bound"] = self.bound
            options["bound_weight"] = self.bound_weight
            options["attack_steps"] = self.attack_steps
        if data.schema is not None:
            # What the columns say of the attacker holds, whatever the flags.
            attacker = data.perturbations.with_norm(self.norm)
            if not isinstance(self.input_range, bool):
                attacker = attacker.replace(input_range=self.input_range)
            elif self.input_range and attacker.input_range is None:
                raise ValueError(
                    f"Data set {data.name} has no valid range; a table takes "
                    "one from `ranges`."
                )
            options.pop("norm", None)
            options["perturbations"] = attacker
        elif not isinstance(self.input_range, bool):
            options["input_range"] = self.input_range
        elif self.input_range:
            if data.input_range is None:
                raise ValueError(
                    f"Data set {data.name} with the normalization "
                    f"{data.normalization!r} has no valid range."
                )
            options["input_range"] = data.input_range
        return wrapper(base, rho, mix=self.mix, **options)


def train_in_folder(
    recipe: Recipe,
    data: Dataset,
    folder: str | os.PathLike,
    verbose: int | str = 2,
    strategy: tf.distribute.Strategy | None = None,
) -> pathlib.Path:
    """Trains, or goes on training, and keeps everything in one folder.

    The folder gets config.json, history.csv, TensorBoard logs, a checkpoint
    at each twentieth of the way, and at last model.keras. If it holds a
    finished run of the same settings, nothing is done.

    Args:
        recipe: how to train.
        data: the data set.
        folder: the folder.
        verbose: as of `keras.Model.fit`.
        strategy: what `keras_rub.distribution.make_strategy` made, or
            `None`. Several workers must share the folder.

    Returns:
        The path of model.keras.

    Raises:
        ValueError: if the folder holds a run of other settings.
    """
    folder = pathlib.Path(folder)
    claim(
        folder,
        settings_of(recipe, data),
        facts=facts_of(data),
        defaults=ADDED,
    )
    path = folder / "model.keras"
    if path.exists():
        return path
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = recipe.build(data)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        _fit_on_workers(recipe, model, data, folder, strategy)
    else:
        backup = _Backup(folder / "backup")
        done = backup.restore(model)
        _forget_after(folder / "history.csv", done)
        recipe.fit(
            model,
            data,
            done=done,
            callbacks=[
                keras.callbacks.CSVLogger(
                    str(folder / "history.csv"), append=True
                ),
                backup,  # behind the history, which so has all it keeps
                keras.callbacks.TensorBoard(str(folder / "tensorboard")),
            ],
            verbose=verbose,
        )
    # Every worker has the same weights and may write; the last one stays.
    save(model, path)
    if strategy is None:
        shutil.rmtree(folder / "backup", ignore_errors=True)
    return path


def settings_of(recipe: Recipe, data: Dataset) -> dict[str, Any]:
    """All that decides what a training leads to, ready for JSON."""
    table = data.options.to_dict()
    label = {"label": table.pop("label")} if "label" in table else {}
    return {
        "dataset": data.name,
        "normalization": data.normalization,
        **label,
        **({"table": table} if table else {}),
        **recipe.to_dict(),
    }


def facts_of(data: Dataset) -> dict[str, Any]:
    """What readers of a trained network want to know of its data."""
    decided = ("dataset", "normalization")  # settings
    return {k: v for k, v in data.metadata.items() if k not in decided}


def read_settings(path: str | os.PathLike) -> dict[str, Any]:
    """The settings of the training of a saved model.

    Args:
        path: a .keras file. Its settings are in the .json file of the same
            name, or in config.json of the same folder.

    Returns:
        What `settings_of` made, perhaps with more; empty if neither file is
        there.
    """
    path = pathlib.Path(path)
    for file in (path.with_suffix(".json"), path.parent / "config.json"):
        if file.exists():
            found = read_json(file)
            if isinstance(found, dict) and "normalization" in found:
                return found
    return {}


class _Backup(keras.callbacks.Callback):
    """Keeps the last epoch in one file, which no kill can tear.

    Keras's own BackupAndRestore writes weights and the number of the epoch
    one after the other, in place.

    Args:
        folder: where the file is kept.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self.folder = folder

    def restore(self, model: keras.Model) -> int:
        """Takes up the last epoch; returns how many are done."""
        done = max(self._files(), default=0)
        if done:
            model.optimizer.build(model.trainable_variables)
            model.load_weights(self._files()[done])
        return done

    def on_epoch_end(self, epoch, logs=None):
        old = self._files()
        path = self.folder / f"{epoch + 1}.weights.h5"
        with replacing(path) as partial:
            self.model.save_weights(partial)
        for file in old.values():
            file.unlink(missing_ok=True)

    def _files(self) -> dict[int, pathlib.Path]:
        return {
            int(path.name.split(".")[0]): path
            for path in self.folder.glob("*.weights.h5")
            if "partial" not in path.name
        }


def _forget_after(history: pathlib.Path, done: int) -> None:
    """Leaves the rows of the epochs that are done, and no half of one."""
    if not history.exists():
        return
    header, *rows = history.read_text(encoding="utf-8").splitlines() or [""]
    width = len(header.split(","))
    kept = {
        row.split(",")[0]: row for row in rows if len(row.split(",")) == width
    }
    whole = [kept[str(epoch)] for epoch in range(done) if str(epoch) in kept]
    if not whole:
        history.unlink()
        return
    write_atomically(history, "\n".join([header, *whole]) + "\n")


def _fit_on_workers(recipe, model, data, folder, strategy):
    """Trains by the workers' own loop; the first of them keeps the logs."""
    loop = distribution.MultiWorkerTraining(
        strategy,
        model,
        functools.partial(recipe.batches, data),
        recipe.batch_size,
        folder,
    )
    first = distribution.worker_index() == 0
    history = folder / "history.csv"
    for logs in loop.run(recipe.epochs, recipe.steps_per_epoch):
        if not first:
            continue
        with open(history, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(logs))
            if logs["epoch"] == 0:
                writer.writeheader()
            writer.writerow(logs)
        print(
            f"{logs['epoch'] + 1}/{recipe.epochs}: "
            + ", ".join(f"{k} {v:.4f}" for k, v in logs.items()),
            flush=True,
        )


def save(model: keras.Model, path: str | os.PathLike) -> None:
    """Saves a model so that a reader never sees half of it."""
    with replacing(path) as partial:
        model.save(partial)


def _choose(name, value, known):
    if value not in known:
        raise ValueError(
            f"`{name}` must be one of {list(known)}. "
            f"Received: `{name}={value!r}`"
        )
