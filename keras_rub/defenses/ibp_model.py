"""IBP: training on interval bounds, alone or beside a cheap attack."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_rub.attacks.ascent import ascend
from keras_rub.bounds.intervals import IntervalBound
from keras_rub.bounds.problem import Problem
from keras_rub.defenses.robust_model import MarginModel, Schedule
from keras_rub.perturbations import PerturbationSet, attacker_of, check_rho

IBP_BOUNDS = ("ibp", "crown-ibp")

# Below this share two quantities count as out of balance (Shi et al.).
_BALANCED = 0.5

# Length of all steps of the attack together, in radii.
_ATTACK_LENGTH = 2.5

# A step at which every schedule has come to its end.
_LATE = 2**30


class _Found(NamedTuple):
    """Attacked inputs (or `None`), and whether a gradient step follows."""

    points: tf.Tensor | None
    training: bool


@keras.saving.register_keras_serializable("keras_rub")
class IBPModel(MarginModel):
    """Trains a classifier on interval bounds: certificates for Linf and L2.

    Interval bound propagation carries a range for every neuron through the
    network, which costs about as much as two more passes. The bound holds for
    every perturbation in the ball. It is loose for a network that was trained
    otherwise, and tight enough for one that was trained on it; certify with
    `keras_rub.certify`, whose linear bounds prove more of the same network.

    The radius must grow: pass a schedule, or use
    `keras_rub.callbacks.RhoSchedule`. While it does, two penalties keep the
    ranges from exploding and the activations from dying (`warmup`).

    `bound_weight` below 1 gives MTL-IBP: the robust loss is
    `bound_weight * loss on the bound + (1 - bound_weight) * loss under
    attack`. The weight is the paper's alpha. Small radii want a small one
    (0.01 to 0.3), which trades provable for clean accuracy; certify with
    `method="auto"` then, because intervals alone prove little.

    BatchNormalization: the bound and the attack use the moving statistics as
    they stood before the step; the clean pass updates them.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output, made of layers that have a rule.
        rho: float or function of the step. The radius, in the units of the
            base model's input. Defaults to `0.1`.
        norm: 1, 2 or `"inf"`. The norm of the perturbation. It counts in the
            first layer, exactly; ranges behind it are boxes. Defaults to
            `"inf"`.
        mix: float in [0, 1] or function of the step. The weight of the robust
            loss. Defaults to `1.0`.
        bound: `"ibp"`, or `"crown-ibp"`: linear bounds of the margins on
            interval ranges, never above those of intervals. A step costs
            about K more passes backward. Defaults to `"ibp"`.
        bound_weight: float in [0, 1]. See above. Defaults to `1.0`, the bound
            alone; 0 is adversarial training.
        attack_steps: int. Gradient steps of the attack, each of
            `2.5 / attack_steps` radii, from a random start. Defaults to `1`.
        warmup: float. Weight of the penalties, times the part of the radius
            that is still to come: it is 0 once the radius is `rho` (or the
            last value of the schedule). One asks that the mean range before
            each activation be at most twice that of the input, the other that
            activations be on and off in like measure. Defaults to `0.5`.
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

    Example:
    ```python
    ramp = keras.optimizers.schedules.PolynomialDecay(0.0, 2000, 0.1)
    model = keras_rub.IBPModel(base, rho=ramp, input_range=(0, 1))
    model.compile("adam", loss="sparse_categorical_crossentropy")
    model.fit(x, y, epochs=10)
    keras_rub.certify(model, x_test, y_test, rho=0.1)
    ```

    References:
        - Gowal et al. "On the Effectiveness of Interval Bound Propagation for
          Training Verifiably Robust Models".
        - Shi et al. "Fast Certified Robust Training with Short Warmup".
        - Zhang et al. "Towards Stable and Efficient Training of Verifiably
          Robust Neural Networks" (CROWN-IBP).
        - De Palma et al. "Expressive Losses for Verified Robustness via
          Convex Combinations" (MTL-IBP).
    """

    honours_categories = True

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        norm: int | str | None = None,
        *,
        mix: float | Schedule = 1.0,
        bound: str = "ibp",
        bound_weight: float = 1.0,
        attack_steps: int = 1,
        warmup: float = 0.5,
        input_range: tuple[Any, Any] | None = None,
        mask: Any = None,
        weights: Any = None,
        perturb: str | None = None,
        categories: Any = None,
        perturbations: PerturbationSet | None = None,
        **kwargs: Any,
    ):
        if bound not in IBP_BOUNDS:
            raise ValueError(
                f"`bound` must be one of {', '.join(IBP_BOUNDS)}. "
                f"Received: `bound={bound!r}`"
            )
        if not 0.0 <= bound_weight <= 1.0:
            raise ValueError(
                "`bound_weight` must be between 0 and 1. "
                f"Received: `bound_weight={bound_weight!r}`"
            )
        if int(attack_steps) < 1:
            raise ValueError(
                "`attack_steps` must be at least 1. "
                f"Received: `attack_steps={attack_steps!r}`"
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
                categories=categories,
            ),
            **kwargs,
        )
        self.bound = bound
        self.bound_weight = float(bound_weight)
        self.attack_steps = int(attack_steps)
        self.warmup = check_rho(warmup, "warmup")
        self._target = check_rho(rho(_LATE) if callable(rho) else rho)
        self.setup()

    def prepare(self):
        super().prepare()
        if not hasattr(self, "_problem"):
            self._problem = Problem.of(
                self.base, self.perturbations, bound="the IBP bound"
            )

    def search(self, x, labels, rho, training=False):
        if self.bound_weight == 1.0:
            return _Found(None, training)

        def loss(points):
            logits = tf.cast(self.logits_of(points), tf.float32)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )

        points = ascend(
            loss,
            x,
            rho,
            self.single_input.perturbations,
            steps=self.attack_steps,
            step_size=_ATTACK_LENGTH / self.attack_steps,
            random_start=True,
            seed=self.step_seed() if training else None,
        )
        return _Found(points, training)

    def robust_outputs(self, x, labels, rho, found):
        return self._outputs(x, labels, rho, self._problem.intervals(x, rho))

    def _outputs(self, x, labels, rho, intervals):
        """Margins [batch, K]; those of intervals take the given ones."""
        competitors = self._problem.competitors(labels)
        if self.bound == "ibp":
            margins = intervals.margins(competitors)
        else:
            margins = self._problem.linear_margins(
                x, labels, rho, "crown", ranges="interval", training=True
            )
        return competitors.to_classes(margins)

    def robust_loss(self, loss, step):
        attacked = margins = penalty = None
        points, training = step.found
        if points is not None:
            single = self.single_input
            attacked = self.logits_of(
                single.with_moved(single.moved(points), step.features)
            )
        if self.bound_weight > 0.0:
            # Bound and penalty share the ranges, and one pass backward.
            intervals = self._problem.intervals(step.features, step.rho)
            margins = self._outputs(
                step.features, step.labels, step.rho, intervals
            )
            if training:
                penalty = self._penalty(step, intervals)

        def total():
            if attacked is None:
                value = loss(margins)
            elif margins is None:
                value = loss(attacked)
            else:
                part = self.bound_weight
                value = part * loss(margins) + (1.0 - part) * loss(attacked)
            return value if penalty is None else value + penalty

        return total

    def _penalty(self, step, intervals) -> tf.Tensor | None:
        """What the warm-up adds to the loss."""
        if not self.warmup or not self._target:
            return None
        # A radius that is a plain number may be raised by a callback.
        ahead = tf.nn.relu(1.0 - step.rho / self._target)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        weight = self.bound_weight * self.warmup * ahead / replicas
        return weight * explosion_and_imbalance(intervals)

    def get_config(self):
        return {
            **super().get_config(),
            **self.perturbations.get_config(),
            "bound": self.bound,
            "bound_weight": self.bound_weight,
            "attack_steps": self.attack_steps,
            "warmup": self.warmup,
        }


def explosion_and_imbalance(bound: IntervalBound) -> tf.Tensor:
    """How far a network is from one that intervals can train.

    The mean over the inputs of all activations of two penalties, each from 0
    to 1 or 2 (Shi et al., equations of section 3.2): how far the mean range
    exceeds twice that of the network's input; and how unlike, in mean and in
    variance, neurons that are always on and always off are.

    Args:
        bound: the ranges of a batch.

    Returns:
        Tensor [].
    """
    box = bound.ball.box
    at_input = tf.reduce_mean(box.high - box.low)
    sources = bound.sources
    total = tf.zeros([], at_input.dtype)
    for low, high in sources:
        width = tf.reduce_mean(high - low)
        total += _shortage(at_input, width)
        center = 0.5 * (low + high)
        spread = tf.square(center - tf.reduce_mean(center))
        on, off = (tf.cast(mask, center.dtype) for mask in (low > 0, high < 0))
        for size in (tf.abs(center), spread):
            is_on, is_off = (tf.reduce_mean(size * mask) for mask in (on, off))
            total += _shortage(is_on, is_off) + _shortage(is_off, is_on)
    return total / max(len(sources), 1)


def _shortage(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """From 0, where one is half of the other, to 1, where it is nothing."""
    known = (one > 0) & (other > 0)
    ratio = one / tf.where(known, other, tf.ones_like(other))
    short = tf.nn.relu(1.0 - ratio / _BALANCED)
    return tf.where(known, short, tf.zeros_like(short))
