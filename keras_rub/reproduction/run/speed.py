"""Training steps a second, all defences taking turns."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import (
    IMAGE_DEFENCES,
    TABLE_DEFENCES,
    SpeedPlan,
)
from keras_rub.reproduction.run.trainer import create_variables
from keras_rub.tracing import compiled


def run(context: Context, plan: SpeedPlan) -> dict[str, dict[str, float]]:
    """Batches a second of each defence, from the name of a set; a job each."""
    decides = dataclasses.replace(plan, tables=(), images=())

    def job(name, defences, normalization):
        def work():
            data = context.load(name, normalization)
            return {"batches_per_second": _measure(data, defences, plan)}

        title = name.removeprefix("uci/")
        return Job(f"speed-{title}", {"set": name, "plan": decides}, work)

    found = context.do(
        {
            **{n: job(n, TABLE_DEFENCES, "default") for n in plan.tables},
            **{n: job(n, IMAGE_DEFENCES, "standard") for n in plan.images},
        },
        alone=True,
    )
    return {name: part["batches_per_second"] for name, part in found.items()}


def _measure(data, defences, plan) -> dict[str, float]:
    rows = np.arange(plan.batch_size) % len(data.train[0])
    batch = tuple(tf.constant(part[rows]) for part in data.train)
    cases = {
        title: _step_of(plan.recipe(title).build(data), data, batch)
        for title in defences
        if title in plan.defences
    }
    rates: dict[str, list[float]] = {title: [] for title in cases}
    for _ in range(plan.rounds):
        for title, step in cases.items():
            rates[title].append(_rate(step, plan.seconds))
    keras.backend.clear_session()
    return {title: float(np.median(found)) for title, found in rates.items()}


def _step_of(model, data, batch) -> Any:
    create_variables(model, data)
    function = compiled(model.train_step)
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
