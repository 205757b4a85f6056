"""The attacks of the paper, run by foolbox."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.attacks.attack import Attack, check_radii
from keras_rub.perturbations import PerturbationSet

# The end of the name of foolbox's class, behind the norm's.
_KINDS = {"fgm": "FastGradientAttack", "pgd": "ProjectedGradientDescentAttack"}


class FoolboxAttack(Attack):
    """One of foolbox's attacks with its default settings.

    This is the protocol of the paper. The L1 attacks are weak: report them
    beside `AdaptivePGD`, never alone. Random starts follow TensorFlow's
    global seed, which is foolbox's way.

    Args:
        model: a robust model or any built Keras classifier.
        norm: 1, 2 or `"inf"`. Defaults to `None`, that of a robust model, for
            any other model `"inf"`.
        kind: `"pgd"` or `"fgm"`. Defaults to `"pgd"`.
        perturbations: as in `Attack`. Foolbox knows neither a mask nor
            weights, and one valid range for all features: any other set is
            refused.
        input_range: pair of numbers `(low, high)`, as in `Attack`. Defaults
            to `None`.
        perturb: as in `Attack`. Defaults to `None`.
        batch_size: int. Samples that are attacked together. Defaults to
            `256`.
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        *,
        kind: str = "pgd",
        perturbations: PerturbationSet | None = None,
        input_range: tuple[float, float] | None = None,
        perturb: str | None = None,
        batch_size: int = 256,
    ):
        super().__init__(
            model,
            norm,
            perturbations=perturbations,
            input_range=input_range,
            perturb=perturb,
            batch_size=batch_size,
        )
        if kind not in _KINDS:
            raise ValueError(
                f'`kind` must be "pgd" or "fgm". Received: `kind={kind!r}`'
            )
        if not can_respect(self.attacker):
            raise ValueError(
                "foolbox knows no `mask`, `weights` or `categories`, and one "
                "valid range for all features: use PGD or AdaptivePGD (pgd, "
                f"apgd-ce). Received: `perturbations={self.attacker!r}`"
            )
        self.kind = kind
        # Eager calls of a Keras model cost more than its arithmetic.
        self._forward = self.traced_once(self._logits, self.points)

    def sweep(self, x: Any, y: Any, radii: Any) -> Any:
        radii, given = check_radii(radii), x
        x, labels = self.check_samples(x, y)
        parts = []
        for first in range(0, len(x), self.batch_size):
            some = slice(first, first + self.batch_size)
            parts.append(self._foolbox(x[some], labels[some], radii))
        return self.unpack_all(np.concatenate(parts, axis=1), given)

    def run(self, x, labels, rho, targets, restart):
        if targets is not None:
            raise ValueError(
                "The paper's attacks are untargeted. Use PGD or AdaptivePGD "
                "with `targets`."
            )
        points = x.copy()
        for radius in np.unique(rho):
            same = rho == radius
            points[same] = self._foolbox(x[same], labels[same], [radius])[0]
        return tf.constant(points)

    def _foolbox(self, x, labels, radii):
        import foolbox  # heavy, and needed by this attack alone

        packed, x = tf.constant(x), self.inputs.moved(x)
        if self.attacker.input_range is None:
            # Bounds that no perturbation can reach.
            reach = 2.0 * max(radii) + 1.0
            bounds = (float(x.min()) - reach, float(x.max()) + reach)
        else:
            low, high = self.attacker.input_range
            bounds = (float(low), float(high))

        def forward(points):
            return self._forward(self.inputs.with_moved(points, packed))

        model = foolbox.TensorFlowModel(forward, bounds, device="/CPU:0")
        attack = getattr(foolbox.attacks, f"L{self.norm}{_KINDS[self.kind]}")()
        found = [
            attack.run(
                model,
                tf.constant(x),
                tf.constant(labels, tf.int64),
                epsilon=float(radius),
            )
            for radius in radii
        ]
        return np.stack(
            [self.inputs.with_moved(points, packed).numpy() for points in found]
        )


def can_respect(perturbations: PerturbationSet) -> bool:
    """Whether foolbox's attacks stay within this set."""
    return (
        perturbations.mask is None
        and perturbations.weights is None
        and not perturbations.categories
        and not any(map(np.ndim, perturbations.input_range or ()))
    )
