"""Training steps a second, all defences taking turns."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.training import Recipe
from reproduction import uci, vision
from reproduction.context import Context
from reproduction.jobs import Job


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        tables: names of UCI sets, or what stands in for them.
        images: names of image sets.
        batch_size: samples a step.
        attack_steps: of PGD; foolbox's default, which the paper uses, is 40.
        rounds: turns of each defence; the median counts.
        seconds: of one turn, about.
        defences: those that are measured.
    """

    tables: tuple[str, ...]
    images: tuple[str, ...]
    batch_size: int
    attack_steps: int
    rounds: int
    seconds: float
    defences: tuple[str, ...] = tuple(vision.DEFENCES)


def jobs(plan: Plan, context: Context) -> list[Job]:
    """One job a data set."""
    settings = dataclasses.asdict(plan)
    del settings["tables"], settings["images"]

    def job(name, defences, normalization):
        def work():
            data = context.load(name, normalization)
            return {"batches_per_second": _measure(data, defences, plan)}

        title = name.removeprefix("uci/")
        return Job(f"speed-{title}", {"set": name, **settings}, work)

    return [
        *(job(name, uci.DEFENCES, "default") for name in plan.tables),
        *(job(name, vision.DEFENCES, "standard") for name in plan.images),
    ]


def _measure(data, defences, plan) -> dict[str, float]:
    rows = np.arange(plan.batch_size) % len(data.train[0])
    batch = tuple(tf.constant(part[rows]) for part in data.train)
    cases = {}
    for title, (defense, norm) in defences.items():
        if title not in plan.defences:
            continue
        recipe = Recipe(
            defense=defense,
            norm=norm,
            rho=0.01,
            rho_ramp=0.0,
            attack_steps=plan.attack_steps,
            batch_size=plan.batch_size,
        )
        cases[title] = _step_of(recipe.build(data), batch)
    rates: dict[str, list[float]] = {title: [] for title in cases}
    for _ in range(plan.rounds):
        for title, step in cases.items():
            rates[title].append(_rate(step, plan.seconds))
    keras.backend.clear_session()
    return {title: float(np.median(found)) for title, found in rates.items()}


def _step_of(model, batch) -> Any:
    model.optimizer.build(model.trainable_variables)
    function = tf.function(model.train_step)
    function(batch)
    return lambda: function(batch)


def _rate(step, seconds) -> float:
    step()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or not count:
        logs = step()
        count += 1
    float(logs["loss"])
    return count / (time.perf_counter() - start)
