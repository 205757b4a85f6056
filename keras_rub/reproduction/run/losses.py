"""The loss that training minimises, beside the loss under attack."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import ARUBModel, attacks, paper_radius
from keras_rub.reproduction.compact import to_columns, to_rows
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import (
    TABLE_DEFENCES,
    BoundPlan,
    CurvePlan,
)
from keras_rub.reproduction.run.trainer import Trainer


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
    # With the digits of float32 and no more: results are kept as text.
    return float(f"{float(tf.reduce_mean(values)):.8g}")


def attacked_loss(base, x, y, rho: float, norm: int | str) -> float:
    """Mean loss at the points where PGD ends, right or wrong before."""
    attack = attacks.make("pgd", base, norm, batch_size=512)
    radii = np.full(len(x), rho, "float32")
    # `run` and not a call, which leaves misclassified samples alone.
    points = attack.run(x, y.astype("int32"), radii, None, 0)
    return _cross_entropy(base(points), y)


def curves(
    context: Context, plan: CurvePlan
) -> dict[tuple[str, float], dict[str, list[float]]]:
    """Losses over training, from the defence and the radius; a job each.

    Returns:
        A dict with one entry a network that is finished: lists `step`,
        `minimised`, `attacked` and `clean`.
    """

    def job(title, rho):
        def work():
            data = context.load(plan.dataset, "unit")
            return _curve(Trainer(plan.recipe(title, rho), data), data, plan)

        settings = {"plan": plan, "defence": title, "rho": rho}
        return Job(f"loss-{plan.dataset}-{title}-{rho:g}", settings, work)

    return context.do(
        {
            (title, rho): job(title, rho)
            for rho in plan.radii
            for title in plan.defences
        }
    )


def _curve(trainer, data, plan) -> dict[str, Any]:
    x, y = (part[: plan.samples] for part in data.validation)
    model, rho = trainer.model, trainer.recipe.rho
    found: dict[str, list[float]] = {
        key: [] for key in ("step", "minimised", "attacked", "clean")
    }

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


def bounds(context: Context, plan: BoundPlan) -> dict[str, list[dict]]:
    """Both losses of every case, from the name of a set; a job each.

    A case is a network at one moment of its training, and a radius.
    """
    decides = dataclasses.replace(plan, sets=())

    def job(name):
        def work():
            return {"rows": to_columns(_cases(context.load(name), plan))}

        title = name.removeprefix("uci/")
        return Job(f"above-{title}", {"set": name, "plan": decides}, work)

    found = context.do({name: job(name) for name in plan.sets})
    return {name: to_rows(part["rows"]) for name, part in found.items()}


def _cases(data, plan) -> list[dict[str, Any]]:
    """Both losses for each norm, network, moment and radius."""
    x, y = (part[: plan.samples] for part in data.train)
    rows = []
    for title in plan.defences:
        _, norm = TABLE_DEFENCES[title]
        trainer = Trainer(plan.recipe(title, len(data.train[0])), data)
        bound = ARUBModel(trainer.model.base, rho=1.0, norm=norm)

        def measure(step, norm=norm, bound=bound, title=title):
            for number, losses in _both_losses(bound, x, y, norm, plan.radii):
                rows.append(
                    {
                        "norm": str(norm),
                        "number": number,
                        "trained": title,
                        "step": step,
                        **losses,
                    }
                )

        for number in plan.training_numbers:
            rho = paper_radius(number, norm, data.input_shape)
            trainer.train(rho, [_Every(plan.every, measure)])
        keras.backend.clear_session()
    return rows


def _both_losses(bound, x, y, norm, numbers):
    """Pairs of a number and a dict with the losses at its radius."""
    clean = bound.worst_case_margins(x, y, rho=0.0).numpy()
    # The bound is linear in the radius.
    slope = bound.worst_case_margins(x, y, rho=1.0).numpy() - clean
    for number in numbers:
        rho = paper_radius(number, norm, x.shape[1:])
        yield (
            number,
            {
                "bound": _cross_entropy(clean + rho * slope, y),
                "attacked": attacked_loss(bound.base, x, y, rho, norm),
            },
        )
