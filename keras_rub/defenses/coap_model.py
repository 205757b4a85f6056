"""COAP: training on a linear relaxation of the network."""

from __future__ import annotations

from typing import Any

import keras

from keras_rub.bounds.problem import Problem
from keras_rub.defenses.robust_model import MarginModel, Schedule
from keras_rub.perturbations import PerturbationSet, attacker_of


@keras.saving.register_keras_serializable("keras_rub")
class COAPModel(MarginModel):
    """Trains a classifier on a provable bound from a linear relaxation.

    Every activation is held between two parallel lines over the range that
    its input can reach, and the margins are bounded by the linear function
    that results ("convex outer adversarial polytope"). The bound holds for
    every perturbation in the ball. One step costs much more than one of
    `RUBModel`, `IBPModel` or `ARUBModel`: each neuron of a layer is
    substituted backward, so that on a CNN a step takes tens of nominal ones.
    Layers with more than 1024 neurons get interval ranges in training, as
    everything must be on the tape at once. The bound is loose for deep
    networks and large radii: ramp the radius.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output, made of layers that have a rule.
        rho: float or function of the step. The radius, in the units of the
            base model's input. Defaults to `0.1`.
        norm: 1, 2 or `"inf"`. The norm of the perturbation. Defaults to
            `"inf"`.
        mix: float in [0, 1] or function of the step. The weight of the robust
            loss. Defaults to `1.0`.
        input_range: pair `(low, high)`, or `None`. The valid inputs. Defaults
            to `None`.
        mask: boolean array that broadcasts to one input, or `None`. The
            features that may change. Defaults to `None`, all of them.
        weights: positive array that broadcasts to one input, or `None`. The
            cost of moving each feature by one unit. Defaults to `None`.
        perturb: string, or `None`. Where `base` takes several inputs, the
            name of the one that the attacker moves. Defaults to `None`, the
            only one of floating point.
        categories: list of `keras_rub.Category` and `keras_rub.Ordinal`, or
            `None`. One-hot and whole-numbered columns, and the price of a
            switch; for norm 1. Defaults to `None`.
        perturbations: `PerturbationSet`, or `None`. The whole attacker, in
            place of the arguments that name a part of it. Defaults to `None`.
        **kwargs: other `keras.Model` arguments, such as `name`.

    References:
        - Wong, Kolter. "Provable Defenses against Adversarial Examples via
          the Convex Outer Adversarial Polytope".
    """

    honours_categories = True

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        norm: int | str | None = None,
        *,
        mix: float | Schedule = 1.0,
        input_range: tuple[Any, Any] | None = None,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        categories: Any = None,
        perturbations: PerturbationSet | None = None,
        **kwargs: Any,
    ):
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
                categories=categories,
            ),
            **kwargs,
        )
        self.setup()

    def prepare(self):
        super().prepare()
        if not hasattr(self, "_problem"):
            self._problem = Problem.of(
                self.base, self.perturbations, bound="the COAP bound"
            )

    def robust_outputs(self, x, labels, rho, found):
        margins = self._problem.linear_margins(
            x, labels, rho, "coap", training=True
        )
        return self._problem.competitors(labels).to_classes(margins)

    def get_config(self):
        return {**super().get_config(), **self.perturbations.get_config()}
