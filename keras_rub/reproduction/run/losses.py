"""The loss that training minimises, beside the loss under attack."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
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

_TOGETHER = 20  # training steps


class _Every(keras.callbacks.Callback):
    """Calls a function after every so many training steps."""

    def __init__(self, steps, function):
        super().__init__()
        self._steps, self._function = steps, function
        self._count = 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += self.model.steps_per_execution
        if self._count % self._steps == 0:
            self._function(self._count)


def _cross_entropy(logits, labels) -> float:
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return _as_text(tf.reduce_mean(values))


def _as_text(value) -> float:
    """With the digits of float32 and no more: results are kept as text."""
    return float(f"{float(value):.9g}")


def attacked_loss(
    attack: attacks.Attack, x: np.ndarray, y: np.ndarray, rho: float
) -> float:
    """Mean loss at the points where an attack ends, right or wrong before.

    Args:
        attack: `attacks.Attack`.
        x: samples, [batch, ...].
        y: labels, [batch].
        rho: the radius.
    """
    radii = np.full(len(x), rho, "float32")
    # `run` and not a call, which leaves misclassified samples alone.
    points = attack.run(x, y.astype("int32"), radii, None, 0)
    return _cross_entropy(attack.base(points), y)


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
    attack = attacks.make("pgd", model.base, "inf", batch_size=512)
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
        found["attacked"].append(attacked_loss(attack, x, y, rho))

    trainer.train(rho, [_Every(plan.every, measure)])
    return found


def bounds(context: Context, plan: BoundPlan) -> dict[str, list[dict]]:
    """The losses of every case, from the name of a set; a job each.

    A case is a network at one moment of its training, and a radius. Besides
    `norm`, `number` (the radius), `trained` (the radius of its training, as a
    number), `rate` and `step` it tells

    - `bound`: the aRUB loss;
    - `paper_bound`: the same as the authors' code computes it;
    - `attacked`: the loss under our PGD;
    - `foolbox`: the loss under foolbox's PGD with its defaults;
    - `train_bound`, `train_attacked`: two of them on training samples, the
      others are on test samples.

    Networks of a large rate can give infinite losses, or no numbers.
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
    """The losses for each norm, network, moment and radius."""
    test, train = (
        tuple(array[: plan.samples] for array in part)
        for part in (data.test, data.train)
    )
    rows = []
    for title in plan.defences:
        _, norm = TABLE_DEFENCES[title]
        # Constant rates and no clipping of gradients, as in the paper.
        trainer = Trainer(
            plan.recipe(title, len(data.train[0])),
            data,
            keras.optimizers.Adam(1e-3),
            together=math.gcd(_TOGETHER, plan.every),
        )
        losses = Losses(trainer.model.base, norm)
        for number, rate in itertools.product(
            plan.training_numbers, plan.rates
        ):
            network = {"norm": str(norm), "trained": number, "rate": rate}

            def measure(step, network=network, losses=losses):
                for radius, found in losses.at(test, train, plan.radii):
                    rows.append(
                        {**network, "number": radius, "step": step, **found}
                    )

            rho = paper_radius(number, norm, data.input_shape)
            trainer.train(rho, [_Every(plan.every, measure)], rate)
        keras.backend.clear_session()
    return rows


class Losses:
    """The losses of one network, whatever its weights; compiled once.

    Args:
        base: the network.
        norm: of the bound and the attacks.
    """

    def __init__(self, base: keras.Model, norm: int | str):
        self._norm = norm
        self._bound = ARUBModel(base, rho=1.0, norm=norm)
        # Its bounds of the inputs are never reached, as in the paper.
        self._foolbox = attacks.make("foolbox-pgd", base, norm, batch_size=512)
        self._pgd = attacks.make("pgd", base, norm, batch_size=512)

    def at(
        self,
        test: tuple[np.ndarray, np.ndarray],
        train: tuple[np.ndarray, np.ndarray],
        numbers: Sequence[float],
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Pairs of a number and a dict with the losses at its radius.

        Args:
            test: samples [batch, ...] and labels [batch].
            train: the same, of the training.
            numbers: the radii; for L1 times the square root of the number of
                features.
        """
        on_test, on_train = self._lines(*test), self._lines(*train)
        shape = test[0].shape[1:]
        for number in numbers:
            rho = paper_radius(number, self._norm, shape)
            # The authors' code multiplies by the square root of the number of
            # features where it is given, and their L1 bound once more.
            again = paper_radius(rho, self._norm, shape)
            yield (
                number,
                {
                    "bound": _cross_entropy(on_test(rho), test[1]),
                    "paper_bound": _as_text(paper_bound(on_test(again))),
                    "attacked": attacked_loss(self._pgd, *test, rho),
                    "foolbox": attacked_loss(self._foolbox, *test, rho),
                    "train_bound": _cross_entropy(on_train(rho), train[1]),
                    "train_attacked": attacked_loss(self._pgd, *train, rho),
                },
            )

    def _lines(self, x, y):
        """Worst-case margins [batch, classes] as a function of the radius."""
        clean = self._bound.worst_case_margins(x, y, rho=0.0)
        slope = self._bound.worst_case_margins(x, y, rho=1.0) - clean
        return lambda rho: clean + rho * slope


def paper_bound(margins: tf.Tensor) -> tf.Tensor:
    """The aRUB loss as the authors' code computes it: large margins overflow.

    Args:
        margins: worst-case margins of all classes, [batch, classes].
    """
    return tf.reduce_mean(tf.math.log(tf.reduce_sum(tf.exp(margins), axis=1)))
