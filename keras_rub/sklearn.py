"""A robust classifier with the manners of scikit-learn.

`import keras_rub.sklearn` is needed: `import keras_rub` alone does not load
scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_is_fitted,
    check_random_state,
    validate_data,
)

from keras_rub import models
from keras_rub.bounds import Certificate, certify
from keras_rub.defenses import RUBModel
from keras_rub.perturbations import PerturbationSet, check_rho

UNITS = ("deviations", "raw")

__all__ = ["RobustClassifier"]


class RobustClassifier(ClassifierMixin, BaseEstimator):
    """A perceptron, trained by RUB to withstand an L1 attacker.

    The columns are standardised inside the network, with the training rows.

    Args:
        rho: float. The radius of the attacker. Defaults to `0.5`.
        units: `"deviations"`: the radius counts standard deviations of the
            training rows; or `"raw"`: units of the columns. Defaults to
            `"deviations"`.
        mask: boolean array [features], or `None`. Columns that an attacker
            can change. Defaults to `None`, all of them.
        weights: positive array [features], or `None`. The cost of moving
            each column by one unit. Defaults to `None`, all ones.
        hidden: widths of the hidden layers. Defaults to `(32,)`.
        epochs: int. Defaults to `50`.
        batch_size: int. Defaults to `32`.
        learning_rate: float. Of Adam. Defaults to `0.01`.
        ramp: float from 0 to 1. The part of the training over which the
            radius grows from 0. Defaults to `0.5`.
        mix: float from 0 to 1. The weight of the robust loss against the
            clean one. Defaults to `1.0`.
        method: of the certificate, as in `keras_rub.certify`. Defaults to
            `"auto"`.
        random_state: int, a NumPy `RandomState`, or `None`. Of the weights
            and of the shuffling. Defaults to `None`.
        verbose: as of `keras.Model.fit`. Defaults to `0`.

    Attributes:
        classes_: the classes [K].
        model_: the trained `keras_rub.RUBModel`; it takes raw columns.
        n_features_in_: the number of columns.
        feature_names_in_: their names, if they had some.

    Example:
    ```python
    from keras_rub.sklearn import RobustClassifier

    search = GridSearchCV(
        RobustClassifier(random_state=0),
        {"rho": [0.1, 0.5]},
        scoring=lambda model, x, y: model.certified_score(x, y, rho=0.5),
    )
    search.fit(x, y)
    ```
    """

    def __init__(
        self,
        rho: float = 0.5,
        *,
        units: str = "deviations",
        mask: Any = None,
        weights: Any = None,
        hidden: Sequence[int] = (32,),
        epochs: int = 50,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        ramp: float = 0.5,
        mix: float = 1.0,
        method: str = "auto",
        random_state: Any = None,
        verbose: int | str = 0,
    ):
        self.rho = rho
        self.units = units
        self.mask = mask
        self.weights = weights
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.ramp = ramp
        self.mix = mix
        self.method = method
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> RobustClassifier:
        """Trains.

        Args:
            X: array or DataFrame of numbers [n, features].
            y: classes [n], of any kind.
        """
        rho = check_rho(self.rho)
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype="numeric", ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "Classifier can't train when only one class is present. "
                f"Received: one class, {self.classes_[0]!r}"
            )
        X = np.asarray(X, "float64")
        mean, deviation = X.mean(axis=0), X.std(axis=0)
        deviation = np.where(deviation > 1e-7 * np.abs(mean), deviation, 1.0)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        keras.utils.set_random_seed(seed)
        base = models.mlp(
            (X.shape[1],),
            len(self.classes_),
            hidden=tuple(self.hidden),
            preprocessing=keras.layers.Normalization(
                mean=mean.tolist(), variance=np.square(deviation).tolist()
            ),
        )
        steps = self.epochs * -(-len(X) // self.batch_size)
        ramp = round(self.ramp * steps)
        radius: Any = rho
        if ramp:
            radius = keras.optimizers.schedules.PolynomialDecay(0.0, ramp, rho)
        self.model_ = RUBModel(
            base,
            radius,
            mix=self.mix,
            perturbations=self._attacker(deviation),
        )
        self.model_.compile(
            keras.optimizers.Adam(self.learning_rate, global_clipnorm=5.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.model_.fit(
            X.astype("float32"),
            numbers,
            epochs=self.epochs,
            batch_size=self.batch_size,
            verbose=self.verbose,
        )
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, K], in the order of `classes_`."""
        X = self._inputs(X)
        logits = self.model_.base.predict(
            X, batch_size=max(self.batch_size, 256), verbose=0
        )
        shifted = logits - logits.max(axis=1, keepdims=True)
        shares = np.exp(shifted.astype("float64"))
        return shares / shares.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The classes [n]."""
        chances = self.predict_proba(X)
        return self.classes_[chances.argmax(axis=1)]

    def certify(self, X: Any, y: Any = None, rho: Any = None) -> Certificate:
        """The certificate of each row, as of `keras_rub.certify`.

        Args:
            X: array or DataFrame [n, features].
            y: classes [n], or `None`, the predictions. Defaults to `None`.
            rho: float, or one a row. Defaults to `None`, that of training.
        """
        X = self._inputs(X)
        found = certify(
            self.model_,
            X,
            None if y is None else self._numbers(y),
            rho=self.rho if rho is None else rho,
            method=self.method,
            decide_only=True,
            verbose=0,
        )
        assert isinstance(found, Certificate)
        return found

    def certified_score(self, X: Any, y: Any, rho: Any = None) -> float:
        """Share of the rows that no attacker within `rho` gets wrong.

        Args:
            X: array or DataFrame [n, features].
            y: the true classes [n].
            rho: float. Defaults to `None`, that of training.
        """
        return float(self.certify(X, y, rho).certified.mean())

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's checks may expect."""
        tags = super().__sklearn_tags__()
        # Weights start at random, unless `random_state` is given.
        tags.non_deterministic = self.random_state is None
        return tags

    def _inputs(self, X) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype="numeric", reset=False)
        return np.asarray(X, "float32")

    def _numbers(self, y) -> np.ndarray:
        """Class numbers of labels that training has seen."""
        y = np.asarray(y)
        places = np.searchsorted(self.classes_, y)
        places = np.minimum(places, len(self.classes_) - 1)
        unknown = y[self.classes_[places] != y]
        if len(unknown):
            raise ValueError(
                f"`y` must hold the classes {self.classes_.tolist()}. "
                f"Received: {unknown[0]!r}"
            )
        return places

    def _attacker(self, deviation) -> PerturbationSet:
        weights = np.ones_like(deviation)
        if self.weights is not None:
            weights = weights * np.asarray(self.weights, "float64")
        if self.units == "deviations":
            weights = weights / deviation
        return PerturbationSet(1, mask=self.mask, weights=weights)

    def _check_parameters(self) -> None:
        if self.units not in UNITS:
            raise ValueError(
                f"`units` must be one of {UNITS}. "
                f"Received: `units={self.units!r}`"
            )
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if int(value) != value or value < 1:
                raise ValueError(
                    f"`{name}` must be a whole number of at least 1. "
                    f"Received: `{name}={value!r}`"
                )
        if not 0.0 <= self.ramp <= 1.0:
            raise ValueError(
                "`ramp` must be between 0 and 1. "
                f"Received: `ramp={self.ramp!r}`"
            )
