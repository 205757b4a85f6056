"""UCI sets: every defence trained and attacked on one set a job."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_rub import attacks, paper_radius
from keras_rub.datasets import Dataset
from keras_rub.reproduction.compact import to_columns, to_rows
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import TABLE_DEFENCES, TablePlan
from keras_rub.reproduction.run.trainer import Trainer
from keras_rub.training import Recipe

NORMS = (1, 2, "inf")

_TOGETHER = 20  # training steps


def run(
    context: Context, plan: TablePlan, leak: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Networks of the sets where every job is done.

    A data set and learning rate is a job.

    Args:
        context: `Context`.
        plan: `TablePlan`.
        leak: whether the label is a feature, on the few sets for that.

    Returns:
        A dict from the name of a set to its networks: `defence`, `rho`, and
        the accuracies on `validation` and `test` samples, each a dict with
        `clean` and a list such as `pgd-inf`, one number a size of the attack.
    """

    def job(name, rate):
        def work():
            data = context.load(name)
            return run_set(with_label(data) if leak else data, rate, plan)

        title = name.removeprefix("uci/") + ("-leak" if leak else "")
        return Job(
            f"uci-{title}-{rate:g}", plan.settings(name, rate, leak), work
        )

    names = plan.leak_sets if leak else plan.sets
    found = context.do(
        {(name, rate): job(name, rate) for name in names for rate in plan.rates}
    )
    done: dict[str, list[dict[str, Any]]] = {}
    for (name, _), part in found.items():
        done.setdefault(name, []).append(part)
    return {
        name: [network for part in parts for network in _networks(part)]
        for name, parts in done.items()
        if len(parts) == len(plan.rates)
    }


def _networks(result):
    """The networks of one job, with accuracies in place of counts."""
    columns = dict(result["networks"])
    for part in ("validation", "test"):
        samples = result[f"{part}_samples"]
        columns[part] = to_rows(
            {
                key: (np.asarray(counts) / samples).tolist()
                for key, counts in columns[part].items()
            }
        )
    return to_rows(columns)


def run_set(data: Dataset, rate: float, plan: TablePlan) -> dict[str, Any]:
    """Trains and attacks all defences on one data set.

    Returns:
        The networks in columns: how many validation and test samples each
        classifies right, without and with attacks.
    """
    prober = _Prober(data, plan)
    networks = []
    for title in plan.defences:
        defense, norm = TABLE_DEFENCES[title]
        recipe = plan.recipe(title, rate, len(data.train[0]))
        trainer = Trainer(recipe, data, together=_TOGETHER)
        numbers = (0.0,) if defense == "nominal" else plan.training_numbers
        for number in numbers:
            rho = paper_radius(number, norm, data.input_shape)
            base = trainer.train(rho)
            networks.append(
                {"defence": title, "rho": rho, **prober.attack(base)}
            )
        keras.backend.clear_session()
    return {
        "features": int(np.prod(data.input_shape)),
        "classes": data.num_classes,
        "validation_samples": prober.split,
        "test_samples": len(prober.y) - prober.split,
        "networks": {
            **to_columns(networks),
            "validation": to_columns([n["validation"] for n in networks]),
            "test": to_columns([n["test"] for n in networks]),
        },
    }


def with_label(data: Dataset) -> Dataset:
    """The label as a last feature, standardised, as the paper's inputs."""
    mean = np.mean(data.train[1])
    deviation = np.std(data.train[1], ddof=1)

    def leak(part):
        x, y = part
        column = ((y - mean) / deviation).astype("float32")
        return np.concatenate([x, column[:, None]], axis=1), y

    return dataclasses.replace(
        data,
        train=leak(data.train),
        validation=leak(data.validation),
        test=leak(data.test),
        feature_names=None,
        raw_scale=None,
    )


class _Prober:
    """Attacks networks of one shape with what was compiled once."""

    def __init__(self, data, plan):
        validation, test = (
            tuple(part[: plan.samples] for part in samples)
            for samples in (data.validation, data.test)
        )
        self.x = np.concatenate([validation[0], test[0]])
        self.y = np.concatenate([validation[1], test[1]])
        self.split = len(validation[0])
        self._plan = plan
        self._network = Recipe(
            defense="nominal", architecture=plan.architecture
        ).build(data)

    def attack(self, base) -> dict[str, Any]:
        """Right samples of a network, by part, attack and norm."""
        self._network.set_weights(base.get_weights())
        found: dict[str, dict[str, Any]] = {"validation": {}, "test": {}}
        for kind in self._plan.attacks:
            for norm in NORMS:
                attack = self._attack(kind, norm)
                radii = [
                    paper_radius(number, norm, self.x.shape[1:])
                    for number in self._plan.numbers
                ]
                points = attack.sweep(self.x, self.y, radii)
                right = np.stack([attack.predict(p) == self.y for p in points])
                for part, counts in self._counts(right).items():
                    found[part][f"{kind}-{norm}"] = counts.tolist()
        right = attack.predict(self.x) == self.y
        for part, count in self._counts(right).items():
            found[part]["clean"] = int(count)
        return found

    def _attack(self, kind, norm):
        options: dict[str, Any] = {"batch_size": 512}
        if kind == "pgd":
            options["steps"] = self._plan.attack_steps
        return attacks.make(kind, self._network, norm, **options)

    def _counts(self, right):
        """Sums over the samples of each part, the last axis of `right`."""
        parts = {
            "validation": right[..., : self.split],
            "test": right[..., self.split :],
        }
        return {name: part.sum(axis=-1) for name, part in parts.items()}
