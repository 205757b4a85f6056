"""Weights to start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import initializers


@keras.saving.register_keras_serializable("keras_rub")
class IBPInitializer(initializers.Initializer):
    """Starts from weights through which intervals keep their width.

    A normal distribution with the deviation `sqrt(2 pi) / n`, n the number of
    inputs of a neuron. Usual initialisations keep the variance of values, and
    let the mean range of an interval grow by a factor of about `sqrt(n)` in
    each layer. For `keras_rub.IBPModel` on networks of many layers.

    Args:
        seed: int or `None`. Defaults to `None`.

    Example:
    ```python
    keras.layers.Dense(
        100, activation="relu", kernel_initializer=keras_rub.IBPInitializer()
    )
    ```

    References:
        - Shi et al. "Fast Certified Robust Training with Short Warmup".
    """

    def __init__(self, seed: int | None = None):
        self.seed = seed

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        inputs = max(math.prod(shape[:-1]), 1)
        normal = initializers.RandomNormal(
            stddev=math.sqrt(2.0 * math.pi) / inputs, seed=self.seed
        )
        return normal(shape, dtype=dtype)

    def get_config(self):
        return {"seed": self.seed}
