"""Recipes that were tried, judged on held-out images."""

from __future__ import annotations

import keras
import numpy as np

import keras_rub
from keras_rub import PerturbationSet, training
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import Trial, TrialPlan


def run(context: Context, plan: TrialPlan) -> dict[Trial, dict[str, float]]:
    """Accuracies of the network of each trial; a job each.

    Returns:
        A dict with one entry a trial that is finished: counts `clean` and
        `certified`, by the paper's bound at the radius of the training, of
        the validation samples `samples`. Without a radius the two are one.
    """
    return context.do({t: _job(context, plan, t) for t in plan.trials})


def _job(context, plan, trial) -> Job:
    def work():
        data = context.load(trial.dataset, trial.normalization)
        path = training.train_in_folder(
            trial.recipe, data, context.out / "models" / trial.name, verbose=0
        )
        keras.backend.clear_session()
        model = keras.models.load_model(path, compile=False)
        base = getattr(model, "base", model)
        x, y = (part[: plan.samples] for part in data.validation)
        right = np.argmax(base.predict(x, verbose=0), axis=-1) == y
        proved = right
        if trial.recipe.defense == "rub":
            proved = keras_rub.certify(
                base,
                x,
                y,
                rho=trial.recipe.rho,
                method="rub",
                perturbations=PerturbationSet(1),
                decide_only=True,
                verbose=0,
            ).certified
        return {
            "samples": len(x),
            "clean": int(right.sum()),
            "certified": int(proved.sum()),
        }

    settings = {
        "dataset": trial.dataset,
        "normalization": trial.normalization,
        "recipe": trial.recipe,
        "samples": plan.samples,
    }
    return Job(trial.name, settings, work)
