"""Baseline: the loss plus the dual norm of its own input gradient."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_rub.attacks.ascent import gradient_of
from keras_rub.defenses.robust_model import (
    RobustModel,
    Schedule,
    attacker_without_range,
)
from keras_rub.perturbations import PerturbationSet


@keras.saving.register_keras_serializable("keras_rub")
class BaselineModel(RobustModel):
    """Trains a classifier on a first-order estimate of the worst loss.

    The loss of a sample is replaced by `loss + rho * ||d loss / d x||_q`, its
    largest value over the ball if the loss itself were linear. It needs one
    gradient where `ARUBModel` needs one a class, works with any loss, and is
    the reference that the paper calls Baseline. It proves nothing.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output.
        rho: float or function of the step. The radius, in the units of the
            base model's input. Defaults to `0.1`.
        norm: 1, 2 or `"inf"`. The norm of the perturbation. Defaults to
            `"inf"`.
        mix: float in [0, 1] or function of the step. The weight of the robust
            loss. Defaults to `1.0`.
        mask: boolean array that broadcasts to one input, or `None`. The
            features that may change. Defaults to `None`, all of them.
        weights: positive array that broadcasts to one input, or `None`. The
            cost of moving each feature by one unit. Defaults to `None`.
        perturb: string, or `None`. Where `base` takes several inputs, the
            name of the one that the attacker moves. Defaults to `None`, the
            only one of floating point.
        perturbations: `PerturbationSet`, or `None`. The whole attacker, in
            place of the arguments that name a part of it. Defaults to `None`.
        **kwargs: other `keras.Model` arguments, such as `name`.
    """

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        norm: int | str | None = None,
        *,
        mix: float | Schedule = 1.0,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        perturbations: PerturbationSet | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            base,
            rho,
            mix=mix,
            perturbations=attacker_without_range(
                perturbations,
                norm=norm,
                mask=mask,
                weights=weights,
                perturb=perturb,
            ),
            **kwargs,
        )
        self.setup()

    def robust_loss(self, loss, step):
        x = step.features
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self.logits_of(x)
            value = loss(outputs)
        # The loss is a mean (or a weighted one) of the samples' losses, so
        # the gradient by one sample's input is its own, equally weighted.
        size = tf.TensorShape(x.shape[1:]).num_elements()
        gradient = tf.reshape(gradient_of(tape, value, x), [-1, size])
        steepest = self.single_input.perturbations.support(
            gradient, tuple(x.shape[1:])
        )
        penalty = step.rho * tf.reduce_sum(steepest)
        return lambda: loss(outputs) + penalty

    def get_config(self):
        config = self.perturbations.get_config()
        del config["input_range"]
        return {**super().get_config(), **config}
