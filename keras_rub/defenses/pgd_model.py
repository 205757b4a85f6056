"""Adversarial training: PGD, and its fast one-step form."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_rub.attacks.ascent import ascend
from keras_rub.defenses.robust_model import (
    RobustModel,
    Schedule,
    fold_in,
)
from keras_rub.perturbations import PerturbationSet, attacker_of


@keras.saving.register_keras_serializable("keras_rub")
class PGDModel(RobustModel):
    """Trains a classifier on the adversarial inputs that PGD finds.

    Each batch is replaced by the points that projected gradient ascent of
    the cross entropy finds in the perturbation set. The attack runs on the
    model in inference mode, and so does the adversarial pass of the loss. It
    proves nothing: a stronger attack may find more.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output.
        rho: float or function of the step. The radius, in the units of the
            base model's input. Defaults to `0.1`.
        norm: 1, 2 or `"inf"`. The norm of the perturbation. Defaults to
            `"inf"`.
        mix: float in [0, 1] or function of the step. The weight of the robust
            loss. Defaults to `1.0`.
        steps: int. Gradient steps of the attack. Defaults to `10`.
        step_size: float. Length of a step, as a multiple of `rho`. Defaults
            to `0.25`.
        random_start: bool. Start at a random point of the set. Defaults to
            `True`.
        restarts: int. Runs of the attack, of which the worst counts for each
            sample. Defaults to `1`.
        input_range: pair `(low, high)`, or `None`. The valid inputs, which
            the adversarial ones do not leave. Defaults to `None`.
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

    References:
        - Madry et al. "Towards Deep Learning Models Resistant to Adversarial
          Attacks".
    """

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        norm: int | str | None = None,
        *,
        mix: float | Schedule = 1.0,
        steps: int = 10,
        step_size: float = 0.25,
        random_start: bool = True,
        restarts: int = 1,
        input_range: tuple[Any, Any] | None = None,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        perturbations: PerturbationSet | None = None,
        **kwargs: Any,
    ):
        for name, value in (("steps", steps), ("restarts", restarts)):
            if int(value) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1. Received: `{name}={value}`"
                )
        if not step_size > 0:
            raise ValueError(
                "`step_size` must be above 0. "
                f"Received: `step_size={step_size}`"
            )
        super().__init__(
            base,
            rho,
            mix=mix,
            perturbations=attacker_of(
                None,
                perturbations,
                default_norm="inf",
                norm=norm,
                mask=mask,
                weights=weights,
                input_range=input_range,
                perturb=perturb,
            ),
            **kwargs,
        )
        self.steps = int(steps)
        self.step_size = float(step_size)
        self.random_start = bool(random_start)
        self.restarts = int(restarts)
        self.setup()

    def search(self, x, labels, rho, training=False):
        def loss(points):
            logits = tf.cast(self.logits_of(points), tf.float32)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )

        best, worst = None, None
        seed = self.step_seed() if training else None
        for number in range(self.restarts):
            found = ascend(
                loss,
                x,
                rho,
                self.single_input.perturbations,
                steps=self.steps,
                step_size=self.step_size,
                random_start=self.random_start,
                seed=None if seed is None else fold_in(seed, number),
            )
            if self.restarts == 1:
                return found
            value = loss(found)
            if best is None:
                best, worst = value, found
                continue
            shape = [-1] + [1] * (len(x.shape) - 1)
            better = tf.reshape(value > best, shape)
            worst = tf.where(better, found, worst)
            best = tf.maximum(best, value)
        return worst

    def robust_outputs(self, x, labels, rho, found):
        single = self.single_input
        return self.logits_of(single.with_moved(single.moved(found), x))

    def get_config(self):
        return {
            **super().get_config(),
            **self.perturbations.get_config(),
            "steps": self.steps,
            "step_size": self.step_size,
            "random_start": self.random_start,
            "restarts": self.restarts,
        }


@keras.saving.register_keras_serializable("keras_rub")
class FGSMModel(PGDModel):
    """Trains a classifier on one-step adversarial inputs ("fast").

    One step of size `1.25 rho` from a random start, projected back: almost as
    good as PGD at small radii, for the price of one gradient. At larger radii
    it can overfit to its own step within an epoch: the training loss falls
    while accuracy under PGD drops to 0. Guard against that with a callback
    that watches accuracy under PGD on a few validation samples, or use
    `PGDModel`.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output.
        rho: float or function of the step. The radius. Defaults to `0.1`.
        norm: 1, 2 or `"inf"`. Defaults to `"inf"`.
        **kwargs: other arguments of `PGDModel`, such as `input_range`.

    References:
        - Wong, Rice, Kolter. "Fast is better than free".
    """

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        norm: int | str | None = None,
        *,
        steps: int = 1,
        step_size: float = 1.25,
        **kwargs: Any,
    ):
        super().__init__(
            base, rho, norm, steps=steps, step_size=step_size, **kwargs
        )
