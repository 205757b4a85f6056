"""The attacks of the paper, run by foolbox."""

from __future__ import annotations

from typing import Any

import foolbox
import keras
import numpy as np
import tensorflow as tf

from keras_rub.attacks.attack import Attack, check_radii

_ATTACKS = {
    ("fgm", 1): foolbox.attacks.L1FastGradientAttack,
    ("fgm", 2): foolbox.attacks.L2FastGradientAttack,
    ("fgm", "inf"): foolbox.attacks.LinfFastGradientAttack,
    ("pgd", 1): foolbox.attacks.L1ProjectedGradientDescentAttack,
    ("pgd", 2): foolbox.attacks.L2ProjectedGradientDescentAttack,
    ("pgd", "inf"): foolbox.attacks.LinfProjectedGradientDescentAttack,
}


class FoolboxAttack(Attack):
    """One of foolbox's attacks with its default settings.

    This is the protocol of the paper. The L1 attacks are weak: report them
    beside `AdaptivePGD`, never alone. Random starts follow TensorFlow's
    global seed, which is foolbox's way.

    Args:
        model: a robust model or any built Keras classifier with logits.
        norm: 1, 2 or `"inf"`. Defaults to `"inf"`.
        kind: `"pgd"` or `"fgm"`. Defaults to `"pgd"`.
        input_range: pair of numbers `(low, high)`, or `None` for no limit.
            Defaults to `None`.
        batch_size: int. Samples that are attacked together. Defaults to
            `256`.
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str = "inf",
        *,
        kind: str = "pgd",
        input_range: tuple[float, float] | None = None,
        batch_size: int = 256,
    ):
        super().__init__(
            model, norm, input_range=input_range, batch_size=batch_size
        )
        if (kind, self.norm) not in _ATTACKS:
            raise ValueError(
                f'`kind` must be "pgd" or "fgm". Received: `kind={kind!r}`'
            )
        if input_range is not None and any(map(np.ndim, input_range)):
            raise ValueError(
                "foolbox knows one valid range for all features. Received: "
                f"`input_range={input_range!r}`"
            )
        self.kind = kind
        # Eager calls of a Keras model cost more than its arithmetic.
        self._forward = self.traced_once(self._logits, self.points)

    def sweep(self, x: Any, y: Any, radii: Any) -> np.ndarray:
        radii = check_radii(radii)
        x, labels = self.check_samples(x, y)
        parts = []
        for first in range(0, len(x), self.batch_size):
            some = slice(first, first + self.batch_size)
            parts.append(self._foolbox(x[some], labels[some], radii))
        return np.concatenate(parts, axis=1)

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
        if self.perturbations.input_range is None:
            # Bounds that no perturbation can reach.
            reach = 2.0 * max(radii) + 1.0
            bounds = (float(x.min()) - reach, float(x.max()) + reach)
        else:
            bounds = tuple(map(float, self.perturbations.input_range))
        model = foolbox.TensorFlowModel(self._forward, bounds, device="/CPU:0")
        attack = _ATTACKS[self.kind, self.norm]()
        points = np.stack(
            [
                attack.run(
                    model,
                    tf.constant(x),
                    tf.constant(labels, tf.int64),
                    epsilon=float(radius),
                ).numpy()
                for radius in radii
            ]
        )
        return points
