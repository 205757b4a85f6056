"""Metrics of robust models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_rub.bounds import decision, methods
from keras_rub.bounds.compiled import CompiledBounds, compiled_bounds
from keras_rub.perturbations import (
    PerturbationSet,
    attacker_of,
    canonical_norm,
    check_rho,
)


@keras.saving.register_keras_serializable("keras_rub")
class CertifiedAccuracy(keras.metrics.Metric):
    """Share of samples whose class no perturbation of radius rho can change.

    Pass it to `compile` of a robust model; it then shows in the logs of `fit`
    and `evaluate`. It evaluates every vertex of every sample, which can cost
    more than the training step itself: to look at it every few epochs only,
    use `keras_rub.callbacks.Certify`.

    Args:
        rho: float. The radius, in the units of the model's input.
        norm: 1, 2 or `"inf"`. Shorthand for the norm alone. Defaults to
            `None`, that of the robust model.
        method: `"rub"` (norm 1 only), `"crown"`, `"coap"`, `"ibp"` or
            `"crown-ibp"`. Defaults to `None`: `"rub"` for norm 1, else
            `"crown"`.
        name: string. Defaults to `"certified_<rho>"`.
        perturbations: `PerturbationSet`, or `None`. Defaults to `None`, the
            attacker of the robust model, as it is trained.
        **kwargs: other `keras.metrics.Metric` arguments.

    Example:
    ```python
    model = keras_rub.RUBModel(base, rho=1.0)
    model.compile(
        "adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", keras_rub.metrics.CertifiedAccuracy(1.0)],
    )
    ```
    """

    def __init__(
        self,
        rho: float,
        norm: int | str | None = None,
        method: str | None = None,
        name: str | None = None,
        *,
        perturbations: PerturbationSet | dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.rho = check_rho(rho)
        self.norm = None if norm is None else canonical_norm(norm)
        if isinstance(perturbations, dict):  # as `get_config` gives it
            perturbations = PerturbationSet.from_config(perturbations)
        self.perturbations = perturbations
        self.method = method
        if perturbations is not None or norm is not None:
            norm = attacker_of(None, perturbations, norm=norm).norm
        methods.find(method, norm, in_graph=True)
        super().__init__(name=name or f"certified_{self.rho:g}", **kwargs)
        self._mean = keras.metrics.Mean()
        self._bounds: Callable[[], CompiledBounds] | None = None
        self._method: methods.Method | None = None
        self._certified: tf.Tensor | None = None

    def attach(self, model: keras.Model) -> None:
        """Names the robust model whose inputs will be shown to the metric."""
        attacker = attacker_of(model, self.perturbations, norm=self.norm)
        self._method = methods.find(self.method, attacker.norm, in_graph=True)
        # A function, because Keras walks all models that it can reach.
        self._bounds = lambda: compiled_bounds(model, attacker)

    def observe(self, x: Any, labels: tf.Tensor) -> None:
        """Certifies one batch of inputs; `update_state` then counts it."""
        if self._bounds is None or self._method is None:
            raise ValueError("The metric is not attached to a robust model.")
        bounds = self._bounds()
        bounds.check_memory(self._method)
        x = bounds.pack(x)
        radii = tf.fill(tf.shape(labels), tf.constant(self.rho, tf.float32))
        margins = bounds.margins(self._method)(x, labels, radii)
        allowance = bounds.allowance(x, labels, radii)
        self._certified = decision.is_proved(margins, allowance)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight=None):
        if self._bounds is None:
            raise ValueError(
                "CertifiedAccuracy needs the inputs, which Keras shows to "
                "metrics of robust models (keras_rub.RUBModel, ...) only. For "
                "a plain model use keras_rub.callbacks.Certify or "
                "keras_rub.certify."
            )
        # Keras builds metrics by a call with no inputs behind it.
        if self._certified is not None:
            certified = tf.cast(self._certified, tf.float32)
            self._certified = None
            self._mean.update_state(certified, sample_weight=sample_weight)

    def result(self):
        return self._mean.result()

    def reset_state(self):
        self._mean.reset_state()

    def get_config(self):
        return {
            **super().get_config(),
            "rho": self.rho,
            "norm": self.norm,
            "method": self.method,
            "perturbations": None
            if self.perturbations is None
            else self.perturbations.get_config(),
        }
