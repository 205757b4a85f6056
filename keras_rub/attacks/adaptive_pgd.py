"""Projected gradient ascent that finds its own step sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_rub.attacks.ascent import (
    gradient_of,
    per_sample,
    random_perturbation,
    steepest_step,
)
from keras_rub.attacks.attack import (
    LABELS,
    RADII,
    SEED,
    Attack,
    positive_int,
)
from keras_rub.attacks.losses import LOSSES, has_won
from keras_rub.attacks.projections import project

# Step halving: a step stays while this part of the steps raised the loss.
_ENOUGH_RAISES = 0.75
_MOMENTUM = 0.75

# L1: balls of three, two and one times the radius for these parts of the
# steps. What is found in a larger ball is only where the next one starts.
_L1_STAGES = ((3.0, 0.3), (2.0, 0.3), (1.0, 0.4))
_L1_CHECK = 0.04  # part of the steps between two looks at the sparsity
_L1_FIRST_SHARE = 0.2  # part of the features that the first steps move
_L1_SPARSER = 0.95  # a perturbation counts as sparser below this
_L1_SHRINK = 1.5
_L1_SMALLEST = 0.1  # smallest step, as a part of the first one


class _State(NamedTuple):
    """Where a run stands; all but `count` by sample."""

    count: tf.Tensor
    d: tf.Tensor
    before: tf.Tensor  # the perturbation one step ago
    gradient: tf.Tensor
    value: tf.Tensor
    step: tf.Tensor  # length of a step
    share: tf.Tensor  # L1: part of the features that a step moves
    best: tf.Tensor  # largest loss so far, where it was, its gradient
    best_d: tf.Tensor
    best_gradient: tf.Tensor
    raises: tf.Tensor  # steps since the last check that raised the loss
    best_before: tf.Tensor  # largest loss at the last check
    kept: tf.Tensor  # whether the step was kept at the last check
    support: tf.Tensor  # L1: number of features moved, at the last check
    won: tf.Tensor
    winner: tf.Tensor  # a perturbation that won


class AdaptivePGD(Attack):
    """Projected gradient ascent without a step size to choose.

    Steps start long, carry momentum, and are halved where the loss stops
    rising; the run then goes on from the best point so far. For L1 the steps
    are sparse instead, as sparse as the best perturbation so far suggests,
    and the search comes in from a larger ball. A sample stops to matter once
    it is won.

    Args:
        model: a robust model or any built Keras classifier.
        norm: 1, 2 or `"inf"`. Defaults to `None`, that of a robust model, for
            any other model `"inf"`.
        steps: int. Gradient steps of a run. Defaults to `100`.
        classes: int, or `None`. How many other classes to aim at, one after
            the other, the likeliest first. Defaults to `None`: aim at none
            in particular.
        restarts: int. Runs; the first starts at the clean input, the others
            at random points. Defaults to `1`.
        **kwargs: other arguments of `Attack`, such as `perturbations`.

    References:
        - Croce, Hein. "Reliable evaluation of adversarial robustness with an
          ensemble of diverse parameter-free attacks".
        - Croce, Hein. "Mind the box: l1-APGD for sparse adversarial attacks
          on image classifiers".
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        *,
        steps: int = 100,
        classes: int | None = None,
        restarts: int = 1,
        **kwargs: Any,
    ):
        self.steps = positive_int("steps", steps)
        if classes is not None:
            positive_int("classes", classes)
        super().__init__(model, norm, restarts=restarts, **kwargs)
        if classes is not None:
            classes = min(classes, self.num_classes - 1)
            self.restarts *= classes
        self.classes = classes
        steps_of = tf.TensorSpec([None], tf.int32)
        self._start = self.traced_once(
            lambda x, rho, seed: random_perturbation(
                x, rho, self.perturbations, seed
            ),
            self.points,
            RADII,
            SEED,
        )
        self._rank = self.traced_once(
            lambda x: tf.argsort(self._logits(x), direction="DESCENDING"),
            self.points,
        )
        self._ascend = self.compiled(
            self._stage, self.points, LABELS, RADII, self.points, steps_of
        )

    def objective(self, points, labels, targets):
        if self.classes is None or targets is None:
            return super().objective(points, labels, targets)
        # Aimed at one class, but any other than the label will do.
        logits = tf.cast(self._logits(points), tf.float32)
        return (
            LOSSES[self.loss](logits, labels, targets),
            has_won(logits, labels, None),
        )

    def run(self, x, labels, rho, targets, restart):
        if self.classes is not None:
            if targets is not None:
                raise ValueError(
                    "`classes` chooses the targets itself: leave out either "
                    "`classes` or `targets`."
                )
            targets = self._aim(x, labels, restart % self.classes)
            restart //= self.classes
        if restart:
            d = self._start(x, rho, (self.seed, restart))
        else:
            d = tf.zeros_like(x)
        if self.norm != 1:
            checks = halving_checks(self.steps)
            return x + self._ascend(x, labels, rho, d, checks, targets)
        for factor, part in _L1_STAGES:
            steps = max(1, round(part * self.steps))
            every = max(1, round(_L1_CHECK * self.steps))
            checks = np.where(
                np.arange(1, steps + 1) % every == 0, every, 0
            ).astype("int32")
            d = self._ascend(
                x, labels, np.float32(factor) * rho, d, checks, targets
            )
        return x + d

    def _aim(self, x, labels, number):
        """The class that ranks at `number` among those other than the label."""
        ranked = self._rank(x).numpy()
        others = ranked[ranked != labels[:, None]].reshape(len(x), -1)
        return others[:, number].astype("int32")

    def _stage(self, x, labels, rho, d, checks, targets):
        """A run within one ball.

        Args:
            x: tensor [batch, *features].
            labels: int tensor [batch].
            rho: tensor [batch].
            d: tensor [batch, *features]. Where to start.
            checks: int tensor [steps]. After a step, how many steps ago the
                last check of the step size was; 0 for no check.
            targets: int tensor [batch], or `None`.

        Returns:
            Tensor like `d`: a perturbation that won, or the best one.
        """

        def look(d):
            with tf.GradientTape() as tape:
                tape.watch(d)
                value, won = self.objective(x + d, labels, targets)
            return value, won, gradient_of(tape, value, d)

        steps = tf.shape(checks)[0]
        d = project(d, x, rho, self.perturbations)
        state = self._first_state(d, rho, *look(d))

        def body(state):
            d = self._move(state, x, rho)
            value, won, gradient = look(d)
            first = won & ~state.won
            better = value > state.best
            state = state._replace(
                count=state.count + 1,
                d=d,
                before=state.d,
                gradient=gradient,
                value=value,
                best=tf.where(better, value, state.best),
                best_d=_pick(better, d, state.best_d),
                best_gradient=_pick(better, gradient, state.best_gradient),
                raises=state.raises + tf.cast(value > state.value, tf.int32),
                won=state.won | won,
                winner=_pick(first, d, state.winner),
            )
            interval = checks[state.count - 1]
            check = self._check_l1 if self.norm == 1 else self._check_steps
            return (
                tf.cond(
                    interval > 0,
                    lambda: check(state, interval, rho),
                    lambda: state,
                ),
            )

        def go_on(state):
            return (state.count < steps) & ~tf.reduce_all(state.won)

        (state,) = tf.while_loop(go_on, body, (state,), parallel_iterations=1)
        return _pick(state.won, state.winner, state.best_d)

    def _first_state(self, d, rho, value, won, gradient):
        size = float(d.shape[1:].num_elements())
        return _State(
            count=tf.constant(0),
            d=d,
            before=d,
            gradient=gradient,
            value=value,
            step=self._first_step(rho),
            share=tf.fill(tf.shape(rho), _L1_FIRST_SHARE),
            best=value,
            best_d=d,
            best_gradient=gradient,
            raises=tf.zeros(tf.shape(rho), tf.int32),
            best_before=value,
            kept=tf.zeros_like(won),
            support=tf.fill(tf.shape(rho), size),
            won=won,
            winner=d,
        )

    def _first_step(self, rho):
        return rho if self.norm == 1 else 2.0 * rho

    def _move(self, state, x, rho):
        step = per_sample(state.step, x) * steepest_step(
            state.gradient, x, state.d, self.perturbations, state.share
        )
        ahead = project(state.d + step, x, rho, self.perturbations)
        if self.norm == 1:
            return ahead
        momentum = tf.where(state.count == 0, 1.0, _MOMENTUM)
        mixed = (
            state.d
            + momentum * (ahead - state.d)
            + (1.0 - momentum) * (state.d - state.before)
        )
        return project(mixed, x, rho, self.perturbations)

    def _check_steps(self, state, interval, rho):
        """Halves the step, and goes back, where the loss no longer rises."""
        rose = tf.cast(state.raises, tf.float32)
        too_few = rose < _ENOUGH_RAISES * tf.cast(interval, tf.float32)
        stuck = state.kept & (state.best <= state.best_before)
        halve = too_few | stuck
        return state._replace(
            step=tf.where(halve, state.step / 2, state.step),
            d=_pick(halve, state.best_d, state.d),
            before=_pick(halve, state.best_d, state.before),
            gradient=_pick(halve, state.best_gradient, state.gradient),
            value=tf.where(halve, state.best, state.value),
            raises=tf.zeros_like(state.raises),
            best_before=state.best,
            kept=~halve,
        )

    def _check_l1(self, state, interval, rho):
        """Sparser steps where the best point got sparser, else shorter ones."""
        size = float(state.d.shape[1:].num_elements())
        moved = tf.reshape(tf.abs(state.best_d) > 0, [-1, int(size)])
        support = tf.reduce_sum(tf.cast(moved, tf.float32), axis=1)
        sparser = support < _L1_SPARSER * state.support
        longest = self._first_step(rho)
        step = tf.where(sparser, longest, state.step / _L1_SHRINK)
        return state._replace(
            share=support / size / _L1_SHRINK,
            step=tf.maximum(step, _L1_SMALLEST * longest),
            d=_pick(sparser, state.best_d, state.d),
            gradient=_pick(sparser, state.best_gradient, state.gradient),
            value=tf.where(sparser, state.best, state.value),
            raises=tf.zeros_like(state.raises),
            support=support,
        )


def halving_checks(steps: int) -> np.ndarray:
    """After which steps to check the step size, and since how many.

    The first check is after 22 % of the steps; each interval is 3 % of the
    steps shorter than the one before it, and at least 6 %.

    Returns:
        Int32 array [steps]: the length of the interval that ends with the
        step, or 0.
    """
    checks = np.zeros(steps, "int32")
    interval, end = max(1, int(0.22 * steps)), 0
    while (end := end + interval) <= steps:
        checks[end - 1] = interval
        interval = max(interval - int(0.03 * steps), int(0.06 * steps), 1)
    return checks


def _pick(condition, yes, no):
    """`tf.where` by sample."""
    shape = [-1] + [1] * (len(yes.shape) - 1)
    return tf.where(tf.reshape(condition, shape), yes, no)
