"""The loss that training minimises, beside the loss under attack."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import ARUBModel, attacks, evaluation
from keras_rub.training import Recipe
from reproduction import uci
from reproduction.context import Context
from reproduction.jobs import Job


@dataclasses.dataclass(frozen=True)
class CurvePlan:
    """Training curves on images.

    Attributes:
        dataset: name of the data set, pixels in [0, 1].
        radii: Linf radii to train for.
        steps: training steps.
        every: steps between two measurements.
        samples: held-out samples to measure on.
        batch_size: samples a step.
    """

    dataset: str
    radii: tuple[float, ...]
    steps: int
    every: int
    samples: int
    batch_size: int = 32


@dataclasses.dataclass(frozen=True)
class BoundPlan:
    """How often the first-order loss is above the attacked one.

    Attributes:
        sets: names of data sets.
        radii: the radii; for L1 times the square root of the number of
            features, as in the paper.
        training_numbers: what the networks are trained for.
        steps: training steps.
        every: steps between two measurements.
        samples: training samples to measure on.
        batch_size: samples a step.
    """

    sets: tuple[str, ...]
    radii: tuple[float, ...]
    training_numbers: tuple[float, ...]
    steps: int
    every: int
    samples: int
    batch_size: int = 256


class _Every(keras.callbacks.Callback):
    """Calls a function after every so many training steps."""

    def __init__(self, steps, function):
        super().__init__()
        self._steps, self._function = steps, function
        self._count = 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1
        if self._count % self._steps == 0:
            self._function(self._count)


def _cross_entropy(logits, labels) -> float:
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return float(tf.reduce_mean(values))


def attacked_loss(base, x, y, rho: float, norm: int | str) -> float:
    """Mean loss at the points where PGD ends, right or wrong before."""
    attack = attacks.make("pgd", base, norm, batch_size=512)
    radii = np.full(len(x), rho, "float32")
    # `run` and not a call, which leaves misclassified samples alone.
    points = attack.run(x, y.astype("int32"), radii, None, 0)
    return _cross_entropy(base(points), y)


def curve_jobs(plan: CurvePlan, context: Context) -> list[Job]:
    """One job a defence and radius."""

    def job(title, rho):
        defense, norm = uci.DEFENCES[title]

        def work():
            data = context.load(plan.dataset, "unit")
            recipe = Recipe(
                defense=defense,
                norm=norm,
                rho=rho,
                rho_ramp=0.0,
                batch_size=plan.batch_size,
                steps=plan.steps,
            )
            return _curve(uci.Trainer(recipe, data), rho, data, plan)

        settings = {**dataclasses.asdict(plan), "defence": title, "rho": rho}
        return Job(f"loss-{plan.dataset}-{title}-{rho:g}", settings, work)

    return [
        job(title, rho)
        for rho in plan.radii
        for title in ("aRUB-Linf", "Baseline-Linf")
    ]


def _curve(trainer, rho, data, plan) -> dict[str, Any]:
    x, y = (part[: plan.samples] for part in data.validation)
    model = trainer.model
    found = {"step": [], "minimised": [], "attacked": [], "clean": []}

    def measure(step):
        logs = model.evaluate(
            x, y, batch_size=len(x), verbose=0, return_dict=True
        )
        found["step"].append(step)
        found["minimised"].append(logs["loss"])
        found["clean"].append(logs["clean_loss"])
        found["attacked"].append(attacked_loss(model.base, x, y, rho, "inf"))

    trainer.train(rho, [_Every(plan.every, measure)])
    return found


def bound_jobs(plan: BoundPlan, context: Context) -> list[Job]:
    """One job a data set."""

    def job(name):
        settings = dataclasses.asdict(plan)
        del settings["sets"]

        def work():
            return _shares(context.load(name), plan)

        title = name.removeprefix("uci/")
        return Job(f"above-{title}", {"set": name, **settings}, work)

    return [job(name) for name in plan.sets]


def _shares(data, plan) -> dict[str, Any]:
    """Both losses for each norm, network, moment and radius."""
    x, y = (part[: plan.samples] for part in data.train)
    rows = []
    for title in ("aRUB-Linf", "aRUB-L1"):
        defense, norm = uci.DEFENCES[title]
        recipe = Recipe(
            defense=defense,
            norm=norm,
            batch_size=min(plan.batch_size, len(data.train[0])),
            steps=plan.steps,
        )
        trainer = uci.Trainer(recipe, data)
        bound = ARUBModel(trainer.model.base, rho=1.0, norm=norm)

        def measure(step, norm=norm, bound=bound, title=title):
            clean = bound.worst_case_margins(x, y, rho=0.0).numpy()
            # The bound is linear in the radius.
            slope = bound.worst_case_margins(x, y, rho=1.0).numpy() - clean
            for number in plan.radii:
                rho = evaluation.paper_radius(number, norm, x.shape[1:])
                rows.append(
                    {
                        "norm": str(norm),
                        "number": number,
                        "trained": title,
                        "step": step,
                        "bound": _cross_entropy(clean + rho * slope, y),
                        "attacked": attacked_loss(bound.base, x, y, rho, norm),
                    }
                )

        for number in plan.training_numbers:
            rho = evaluation.paper_radius(number, norm, data.input_shape)
            trainer.train(rho, [_Every(plan.every, measure)])
        keras.backend.clear_session()
    return {"rows": rows}
