"""Callbacks for training robust models."""

from __future__ import annotations

from typing import Any, Unpack

import keras

from keras_rub.bounds.certification import Settings, certify
from keras_rub.perturbations import check_rho

_SHAPES = {
    "linear": lambda fraction: fraction,
    "smooth": lambda fraction: fraction**2 * (3.0 - 2.0 * fraction),
}


class RhoSchedule(keras.callbacks.Callback):
    """Raises the radius from epoch to epoch.

    The first `wait` epochs run at `start`; over the next `epochs` the radius
    grows to its final value, which it then keeps. It depends on the number of
    the epoch only, so a run that is resumed goes on as it would have.

    Args:
        rho: float or `None`. The final value. Defaults to `None`, the
            model's own value when training begins.
        epochs: int. Length of the ramp in epochs. Defaults to `10`.
        shape: `"linear"` or `"smooth"` (flat at both ends). Defaults to
            `"linear"`.
        start: float. The value before the ramp. Defaults to `0.0`.
        wait: int. Epochs before the ramp. Defaults to `0`.
        parameter: `"rho"` or `"mix"`. What to raise: the radius, or the
            weight of the robust loss. Defaults to `"rho"`.

    Example:
    ```python
    model = keras_rub.RUBModel(base, rho=2.8)
    ramp = keras_rub.callbacks.RhoSchedule(epochs=5, shape="smooth")
    model.fit(x, y, epochs=10, callbacks=[ramp])
    ```
    """

    def __init__(
        self,
        rho: float | None = None,
        epochs: int = 10,
        shape: str = "linear",
        *,
        start: float = 0.0,
        wait: int = 0,
        parameter: str = "rho",
    ):
        super().__init__()
        if shape not in _SHAPES:
            raise ValueError(
                f"`shape` must be one of {sorted(_SHAPES)}. "
                f"Received: `shape={shape!r}`"
            )
        if parameter not in ("rho", "mix"):
            raise ValueError(
                '`parameter` must be "rho" or "mix". '
                f"Received: `parameter={parameter!r}`"
            )
        if epochs < 1 or wait < 0:
            raise ValueError(
                "`epochs` must be at least 1 and `wait` at least 0. "
                f"Received: `epochs={epochs}`, `wait={wait}`"
            )
        self.target = None if rho is None else check_rho(rho)
        self.epochs = epochs
        self.shape = shape
        self.start = check_rho(start, "start")
        self.wait = wait
        self.parameter = parameter

    def value(self, epoch: int) -> float:
        """The radius (or mix weight) of the epoch with this number.

        Raises:
            ValueError: if the final value is the model's own, which is known
                only once training has begun.
        """
        if self.target is None:
            raise ValueError(
                "The final value is the model's own, which is known when "
                "training begins. Pass `rho` to RhoSchedule to ask before. "
                "Received: `rho=None`"
            )
        fraction = min(max((epoch - self.wait) / self.epochs, 0.0), 1.0)
        fraction = _SHAPES[self.shape](fraction)
        return self.start + fraction * (self.target - self.start)

    def on_train_begin(self, logs=None):
        if not hasattr(self.model, self.parameter):
            raise ValueError(
                "RhoSchedule needs a robust model, such as "
                f"keras_rub.RUBModel. Received: {type(self.model).__name__}"
            )
        if self.target is None:
            self.target = getattr(self.model, self.parameter)

    def on_epoch_begin(self, epoch, logs=None):
        setattr(self.model, self.parameter, self.value(epoch))


class Certify(keras.callbacks.Callback):
    """Certifies some samples every few epochs and logs the result.

    The share of certified samples is added to the logs of the epoch as
    `certified_<rho>`, where callbacks that come later in the list
    (`EarlyStopping`, `ModelCheckpoint`, `TensorBoard`) and the history find it.

    Args:
        x: array [n, *features].
        y: class numbers [n] or one-hot rows [n, K].
        rho: float, or a list of radii.
        every: int. Certify after each `every`-th epoch. Defaults to `1`.
        **kwargs: other arguments of `keras_rub.certify`, such as
            `perturbations` and `method`. The attacker is the model's own by
            default.

    Example:
    ```python
    look = keras_rub.callbacks.Certify(x_val, y_val, rho=[0.5, 1.0], every=5)
    model.fit(x, y, epochs=20, callbacks=[look])
    ```
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        rho: float | list[float] | tuple[float, ...],
        every: int = 1,
        **kwargs: Unpack[Settings],
    ):
        super().__init__()
        if every < 1:
            raise ValueError(
                f"`every` must be at least 1. Received: `every={every}`"
            )
        self.x, self.y = x, y
        self.radii = [
            check_rho(radius)
            for radius in (rho if isinstance(rho, (list, tuple)) else [rho])
        ]
        self.every = every
        self.settings: Settings = {
            "decide_only": True,
            "verbose": 0,
            **kwargs,
        }

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every or logs is None:
            return
        table = certify(
            self.model, self.x, self.y, rho=self.radii, **self.settings
        )
        for certificate in table:
            name = f"certified_{certificate.rho:g}"
            logs[name] = certificate.certified_accuracy
