"""RUB: training on a provable bound of the worst loss in an L1 ball."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_rub.bounds import screening
from keras_rub.bounds.competitors import draw
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.vertices import WorstCase
from keras_rub.defenses.robust_model import (
    MarginModel,
    Schedule,
    count_or_all,
)
from keras_rub.perturbations import PerturbationSet, attacker_of


class _Sample(NamedTuple):
    """Some competitors of each sample, drawn for one training step.

    `drawn` [batch, C] are their numbers and `worst` their worst cases. Where
    the margins [batch, K - 1] of all competitors are known, `shares`
    [batch, C] is how likely each draw was.
    """

    drawn: tf.Tensor
    worst: WorstCase
    margins: tf.Tensor | None = None
    shares: tf.Tensor | None = None


@keras.saving.register_keras_serializable("keras_rub")
class RUBModel(MarginModel):
    """Trains a classifier on a provable bound of the worst loss, L1 attacks.

    The network is replaced by a majorant that is convex in the perturbation,
    so that its maximum over the L1 ball is at one of the 2M vertices. With
    `vertices="all"` the bound holds for every perturbation in the ball; with
    the default, a number, only the most promising vertices of each sample are
    evaluated: training is several times faster and its loss, within a fraction
    of a percent of the exact one, is not a certificate.

    At a large `rho` start from a small one: without a ramp training can stay
    at chance. See `keras_rub.callbacks.RhoSchedule`, or pass a schedule.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output, made of layers that have a rule.
        rho: float or function of the step. The radius, in the units of the
            base model's input. Defaults to `0.1`.
        norm: 1. There for the sake of the other defences, which know more
            norms. Defaults to `None`, 1.
        mix: float in [0, 1] or function of the step. The weight of the robust
            loss. Defaults to `1.0`.
        input_range: pair `(low, high)`, or `None`. The valid inputs, which an
            attack can't leave; the bound is then tighter. Defaults to `None`.
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
        vertices: int or `"all"`. How many vertices a sample to evaluate.
            Defaults to `32`.
        competitors: int or `"all"`. How many competing classes a sample a
            training step looks at, drawn anew each time, the likely ones more
            often; the others rise as these do. A step then costs the same
            for any number of classes. With `vertices="all"` the gradient of
            the draw is unbiased. Validation and `worst_case_margins` look at
            all. Defaults to `1`.
        memory_budget: int. Bytes that one chunk of vertices may take.
            Defaults to `2**26` (64 MiB).
        **kwargs: other `keras.Model` arguments, such as `name`.

    Example:
    ```python
    model = keras_rub.RUBModel(base, rho=2.8)
    model.compile("adam", loss="sparse_categorical_crossentropy")
    ramp = keras_rub.callbacks.RhoSchedule(epochs=5)
    model.fit(x, y, epochs=10, callbacks=[ramp])
    ```

    References:
        - Bertsimas, Boix, Villalobos Carballo, den Hertog. "Robust Upper
          Bounds for Adversarial Training", section 5.
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
        vertices: int | str = 32,
        competitors: int | str = 1,
        memory_budget: int = 2**26,
        **kwargs: Any,
    ):
        if not int(memory_budget) > 0:
            raise ValueError(
                "`memory_budget` must be a positive number of bytes. "
                f"Received: `memory_budget={memory_budget!r}`"
            )
        attacker = attacker_of(
            None,
            perturbations,
            norm=norm,
            mask=mask,
            weights=weights,
            input_range=input_range,
            perturb=perturb,
            categories=categories,
        )
        if attacker.norm != 1:
            raise ValueError(
                "RUBModel bounds L1 perturbations only; for another norm use "
                f"ARUBModel or IBPModel with `norm={attacker.norm!r}`. "
                f"Received: `perturbations={attacker!r}`"
            )
        super().__init__(
            base,
            rho,
            mix=mix,
            perturbations=attacker,
            **kwargs,
        )
        self.vertices = count_or_all("vertices", vertices)
        self.competitors = count_or_all("competitors", competitors)
        self.memory_budget = int(memory_budget)
        self.setup()

    def prepare(self):
        super().prepare()
        if not hasattr(self, "_problem"):
            problem = Problem.of(
                self.base,
                self.perturbations,
                self.memory_budget,
                bound="the RUB bound",
            )
            # Lists the vertices, so that a shape that has none is found now.
            _ = problem.expansion
            self._problem = problem

    def search(self, x, labels, rho, training=False):
        count = self.drawn_competitors if training else "all"
        if isinstance(count, str):
            bound = self._problem.vertex_bound(x, labels, rho)
            return bound.worst_case(screening.candidates(bound, self.vertices))
        clean, seed = self._problem.clean(x), self.step_seed()
        if isinstance(self.vertices, str):
            bound = self._problem.vertex_bound(x, labels, rho, clean=clean)
            worst = bound.worst_case()
            drawn, shares = draw(worst.margins, count, replace=True, seed=seed)
            return _Sample(drawn, worst.take(drawn), worst.margins, shares)
        competitors = self._problem.competitors(labels)
        logits = clean.values[self._problem.program.output]
        drawn, _ = draw(
            competitors.margins(logits), count, replace=False, seed=seed
        )
        bound = self._problem.vertex_bound(
            x, labels, rho, clean=clean, drawn=drawn
        )
        # As many for each as there are when all are searched.
        vertices = -(-self.vertices * count // (self.num_classes - 1))
        worst = bound.worst_case(screening.candidates(bound, vertices))
        return _Sample(drawn, worst)

    def robust_outputs(self, x, labels, rho, found):
        if isinstance(found, WorstCase):
            bound = self._problem.vertex_bound(x, labels, rho)
            competitors = bound.relaxation.competitors
            return competitors.to_classes(bound.at_worst_case(found))
        clean = self._problem.clean(x)
        bound = self._problem.vertex_bound(
            x, labels, rho, clean=clean, drawn=found.drawn
        )
        competitors = bound.relaxation.competitors
        margins = bound.at_worst_case(found.worst)
        if found.margins is None:
            everyone = self._problem.competitors(labels)
            logits = clean.values[self._problem.program.output]
            lifted = competitors.lift(
                everyone.margins(logits),
                margins - bound.relaxation.clean_margins,
            )
            return competitors.to_classes(lifted)
        # The value of every margin is known; one draw stands for the gradients
        # of all, as often as it is rare.
        weights = 1.0 / (found.shares * found.shares.shape[-1])
        change = (margins - tf.stop_gradient(margins)) * weights
        return competitors.to_classes(
            found.margins + competitors.spread(change)
        )

    def get_config(self):
        config = self.perturbations.get_config()
        del config["norm"]
        return {
            **super().get_config(),
            **config,
            "vertices": self.vertices,
            "competitors": self.competitors,
            "memory_budget": self.memory_budget,
        }
