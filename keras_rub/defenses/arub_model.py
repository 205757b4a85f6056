"""aRUB: training on a first-order bound, for any differentiable network."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_rub.attacks.ascent import gradient_of
from keras_rub.bounds.first_order import first_order_margins
from keras_rub.defenses.robust_model import (
    MarginModel,
    Schedule,
    attacker_without_range,
    count_or_all,
)
from keras_rub.perturbations import PerturbationSet


class _Choice(NamedTuple):
    """How many competitors to look at, and the seed of that draw."""

    competitors: int | str
    seed: tf.Tensor | None = None


@keras.saving.register_keras_serializable("keras_rub")
class ARUBModel(MarginModel):
    """Trains a classifier on a first-order bound of the worst loss.

    Each margin is replaced by `m_k(x) + rho * ||d m_k / d x||_q`, its largest
    value over the ball if the network were linear; q is the dual norm. It
    needs nothing but gradients, so it works on any differentiable base.

    WARNING: the bound is exact only to first order in `rho`. It is no
    certificate: use `keras_rub.RUBModel` for a bound that holds.

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
        competitors: int or `"all"`. How many competing classes a sample a
            training step looks at, drawn anew each time, the likely ones more
            often; the others rise as these do. Defaults to `1`.
        **kwargs: other `keras.Model` arguments, such as `name`.

    Example:
    ```python
    model = keras_rub.ARUBModel(base, rho=0.1, norm="inf")
    model.compile("adam", loss="sparse_categorical_crossentropy")
    model.fit(x, y, epochs=10)
    ```

    References:
        - Bertsimas, Boix, Villalobos Carballo, den Hertog. "Robust Upper
          Bounds for Adversarial Training", section 4.
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
        competitors: int | str = 1,
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
        self.competitors = count_or_all("competitors", competitors)
        self._has_gradient = False  # not known yet
        self.setup()

    def search(self, x, labels, rho, training=False):
        if not self._has_gradient:
            with tf.GradientTape() as tape:
                tape.watch(x)
                logits = self.logits_of(x)
            gradient_of(tape, logits, x)
            self._has_gradient = True
        if not training:
            return _Choice("all")
        return _Choice(self.drawn_competitors, self.step_seed())

    def robust_outputs(self, x, labels, rho, found):
        return first_order_margins(
            self.logits_of,
            x,
            labels,
            rho,
            self.single_input.perturbations,
            competitors=found.competitors,
            seed=found.seed,
        )

    def get_config(self):
        config = self.perturbations.get_config()
        del config["input_range"]
        return {
            **super().get_config(),
            **config,
            "competitors": self.competitors,
        }
