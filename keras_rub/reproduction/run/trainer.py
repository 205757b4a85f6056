"""Small networks that are trained many times."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from keras_rub.datasets import Dataset
from keras_rub.training import Recipe


def create_variables(model: keras.Model, data: Dataset) -> None:
    """Makes the variables of optimiser and metrics.

    Made inside the first step, they would have it traced twice.
    """
    x, y = (part[:1] for part in data.train)
    model.optimizer.build(model.trainable_variables)
    y_pred = model(x)
    model.compute_loss(x, y, y_pred)
    model.compute_metrics(x, y, y_pred)
    model.reset_metrics()


class Trainer:
    """One network, trained anew for each radius but compiled once.

    Args:
        recipe: `Recipe`; its radius does not matter.
        data: `Dataset`.
        optimizer: instead of the recipe's. Defaults to `None`.
        together: int. Steps that run without coming back to Python, which
            takes longer than a small step; callbacks see the last of them.
            Fewer where they don't divide the steps. Defaults to 1.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        optimizer: keras.optimizers.Optimizer | None = None,
        together: int = 1,
    ):
        self.recipe = recipe
        self.data = data
        self.model = recipe.build(data)
        if optimizer is not None:
            self.model.compile(optimizer, self.model.loss, metrics=["accuracy"])
        self.model.steps_per_execution = math.gcd(together, recipe.steps)
        self._weights = self.model.get_weights()
        create_variables(self.model, data)
        self._rho = tf.Variable(0.0)
        if recipe.defense != "nominal":
            steps = max(recipe.rho_ramp * recipe.steps, 1.0)
            self.model.rho = lambda step: (
                self._rho * tf.minimum(tf.cast(step, tf.float32) / steps, 1.0)
            )

    def train(
        self, rho: float, callbacks: Any = None, rate: float | None = None
    ) -> keras.Model:
        """Trains from the same start; returns the network itself.

        Args:
            rho: the radius.
            callbacks: as of `keras.Model.fit`. Defaults to `None`.
            rate: with an optimizer of your own, its learning rate.
        """
        keras.utils.set_random_seed(self.recipe.seed)
        self.model.set_weights(self._weights)
        for variable in self.model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        if rate is not None:
            self.model.optimizer.learning_rate = rate
        self._rho.assign(rho)
        self.model.fit(
            self.recipe.batches(self.data),
            steps_per_epoch=self.recipe.steps,
            shuffle=False,  # the batches are shuffled
            verbose=0,
            callbacks=callbacks,
        )
        return getattr(self.model, "base", self.model)
