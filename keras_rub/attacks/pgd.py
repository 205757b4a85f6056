"""Plain projected gradient ascent as an attack."""

from __future__ import annotations

from typing import Any

import keras

from keras_rub.attacks.ascent import ascend
from keras_rub.attacks.attack import (
    LABELS,
    RADII,
    SEED,
    Attack,
    positive_int,
)


class PGD(Attack):
    """Projected gradient ascent with steps of one length.

    Args:
        model: a robust model or any built Keras classifier.
        norm: 1, 2 or `"inf"`. Defaults to `None`, that of a robust model, for
            any other model `"inf"`.
        steps: int. Gradient steps. Defaults to `40`.
        step_size: float, or `None`. Length of a step, as a multiple of the
            radius. Defaults to `None`, `2.5 / steps`.
        random_start: bool. Start at a random point of the set. Defaults to
            `True`.
        **kwargs: other arguments of `Attack`, such as `perturbations`.

    Example:
    ```python
    attack = keras_rub.attacks.PGD(model, norm=2, input_range=(0, 1))
    x_attacked = attack(x_test, y_test, rho=0.5)
    ```

    References:
        - Madry et al. "Towards Deep Learning Models Resistant to Adversarial
          Attacks".
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        *,
        steps: int = 40,
        step_size: float | None = None,
        random_start: bool = True,
        **kwargs: Any,
    ):
        super().__init__(model, norm, **kwargs)
        self.steps = positive_int("steps", steps)
        self.step_size = 2.5 / self.steps if step_size is None else step_size
        if not self.step_size > 0:
            raise ValueError(
                "`step_size` must be above 0. "
                f"Received: `step_size={step_size}`"
            )
        self.random_start = bool(random_start)
        self._ascend = self.compiled(
            self._run, self.points, LABELS, RADII, SEED
        )

    def run(self, x, labels, rho, targets, restart):
        return self._ascend(x, labels, rho, (self.seed, restart), targets)

    def _run(self, x, labels, rho, seed, targets):
        return ascend(
            lambda points: self.objective(points, labels, targets)[0],
            x,
            rho,
            self.perturbations,
            steps=self.steps,
            step_size=self.step_size,
            random_start=self.random_start,
            seed=seed,
        )
