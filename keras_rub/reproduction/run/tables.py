"""Tables of numbers: every defence trained and attacked on one set a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import attacks, evaluation
from keras_rub.datasets import Dataset
from keras_rub.training import Recipe
from reproduction.jobs import Job

# The paper's name, the defence and the norm it trains against.
DEFENCES = {
    "RUB": ("rub", 1),
    "aRUB-L1": ("arub", 1),
    "aRUB-Linf": ("arub", "inf"),
    "Baseline-Linf": ("baseline", "inf"),
    "PGD-Linf": ("pgd", "inf"),
    "Nominal": ("nominal", "inf"),
}
ATTACKS = ("fgm", "pgd")
NORMS = (1, 2, "inf")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the networks of one set are trained and attacked.

    Attributes:
        sets: names for `keras_rub.datasets.load`.
        leak_sets: those that are run with the label as a feature, too.
        numbers: sizes of the attacks; for L1 times the square root of the
            number of features, as in the paper.
        training_numbers: the same, of the radii to train for.
        rates: learning rates.
        steps: training steps.
        batch_size: samples a step.
        architecture: of `keras_rub.training.ARCHITECTURES`.
        vertices: with RUB, vertices a sample to evaluate.
        samples: validation and test samples each, at most.
        defences: those of `DEFENCES` that are run.
    """

    sets: tuple[str, ...]
    leak_sets: tuple[str, ...]
    numbers: tuple[float, ...]
    training_numbers: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int
    batch_size: int
    architecture: str = "mlp"
    vertices: int = 16
    samples: int = 500
    defences: tuple[str, ...] = tuple(DEFENCES)

    def settings(self, name: str, rate: float, leak: bool) -> dict[str, Any]:
        """All that decides the result of one job."""
        found = dataclasses.asdict(self)
        for key in ("sets", "leak_sets", "rates"):
            del found[key]
        if self.defences == tuple(DEFENCES):
            del found["defences"]
        return {"set": name, "rate": rate, "leak": leak, **found}


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


def run_set(data: Dataset, rate: float, plan: Plan) -> dict[str, Any]:
    """Trains and attacks all defences on one data set.

    Returns:
        A dict with one entry a network: the accuracies on validation and
        test samples, without and with attacks.
    """
    prober = _Prober(data, plan)
    networks = []
    for title in plan.defences:
        defense, norm = DEFENCES[title]
        trainer = Trainer(
            Recipe(
                defense=defense,
                norm=norm,
                vertices=plan.vertices,
                architecture=plan.architecture,
                learning_rate=rate,
                batch_size=min(plan.batch_size, len(data.train[0])),
                steps=plan.steps,
            ),
            data,
        )
        numbers = (0.0,) if defense == "nominal" else plan.training_numbers
        for number in numbers:
            rho = evaluation.paper_radius(number, norm, data.input_shape)
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
        "networks": networks,
    }


class Trainer:
    """One network, trained anew for each radius but compiled once.

    Args:
        recipe: `Recipe`; its radius does not matter.
        data: `Dataset`.
    """

    def __init__(self, recipe: Recipe, data: Dataset):
        self.recipe = recipe
        self.data = data
        self.model = recipe.build(data)
        self._weights = self.model.get_weights()
        self._rho = tf.Variable(0.0)
        if recipe.defense != "nominal":
            steps = max(recipe.rho_ramp * recipe.steps, 1.0)
            self.model.rho = lambda step: (
                self._rho * tf.minimum(tf.cast(step, tf.float32) / steps, 1.0)
            )

    def train(self, rho: float, callbacks: Any = None) -> keras.Model:
        """Trains from the same start; returns the network itself."""
        keras.utils.set_random_seed(self.recipe.seed)
        self.model.set_weights(self._weights)
        for variable in self.model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        self._rho.assign(rho)
        self.model.fit(
            self.data.batches(
                "train",
                self.recipe.batch_size,
                repeat=True,
                seed=self.recipe.seed,
            ),
            steps_per_epoch=self.recipe.steps,
            verbose=0,
            callbacks=callbacks,
        )
        return getattr(self.model, "base", self.model)


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
        self._numbers = plan.numbers
        self._network = getattr(
            model := Recipe(
                defense="nominal", architecture=plan.architecture
            ).build(data),
            "base",
            model,
        )

    def attack(self, base) -> dict[str, Any]:
        """Accuracies of a network, by part, attack and norm."""
        self._network.set_weights(base.get_weights())
        found = {"validation": {}, "test": {}}
        for kind in ATTACKS:
            for norm in NORMS:
                attack = attacks.make(kind, self._network, norm, batch_size=512)
                radii = [
                    evaluation.paper_radius(n, norm, self.x.shape[1:])
                    for n in self._numbers
                ]
                points = attack.sweep(self.x, self.y, radii)
                right = np.stack([attack.predict(p) == self.y for p in points])
                for part, where in (
                    ("validation", slice(None, self.split)),
                    ("test", slice(self.split, None)),
                ):
                    found[part][f"{kind}-{norm}"] = (
                        right[:, where].mean(axis=1).round(5).tolist()
                    )
        right = attack.predict(self.x) == self.y
        found["validation"]["clean"] = float(right[: self.split].mean())
        found["test"]["clean"] = float(right[self.split :].mean())
        return found


def jobs(
    plan: Plan, load: Callable[[str], Dataset], leak: bool = False
) -> list[Job]:
    """One job a data set and learning rate.

    Args:
        plan: `Plan`.
        load: from a name to the data set.
        leak: whether the label is a feature, on the few sets for that.
    """

    def job(name, rate):
        def work():
            data = load(name)
            return run_set(with_label(data) if leak else data, rate, plan)

        title = name.removeprefix("uci/") + ("-leak" if leak else "")
        return Job(
            f"uci-{title}-{rate:g}", plan.settings(name, rate, leak), work
        )

    names = plan.leak_sets if leak else plan.sets
    return [job(name, rate) for name in names for rate in plan.rates]
