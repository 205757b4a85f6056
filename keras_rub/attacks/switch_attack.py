"""The attack on tables: switches of categories, and moves in between."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.attacks.adaptive_pgd import AdaptivePGD
from keras_rub.attacks.attack import Attack, positive_int
from keras_rub.categories import single_switches, switched_rows
from keras_rub.perturbations import PerturbationSet

# Rows that switches reach are enumerated up to so many a sample; where there
# are more, the best switch is made, then the next best, and so on.
_ENUMERATED = 1024

# Rounds of: choose the switches for the moves, then the moves for these.
_ROUNDS = 2


class SwitchAttack(Attack):
    """Switches categories, and moves the other features by an L1 attack.

    Of the rows that switches alone reach, those with the highest loss are
    attacked by adaptive PGD within what the switches leave of the radius. Then
    switches are chosen anew for the moves that were best, and so on. Where
    rows are too many to be enumerated, switches are made one by one, the best
    first.

    Args:
        model: as in `Attack`.
        norm: as in `Attack`.
        perturbations: as in `Attack`; it must have categories.
        candidates: int. Rows a sample whose moves are searched in a round.
            Defaults to `8`.
        loss: as in `Attack`. Defaults to `"margin_ratio"`.
        **kwargs: other arguments of `Attack`.
    """

    def __init__(
        self,
        model: keras.Model,
        norm: int | str | None = None,
        *,
        perturbations: PerturbationSet | None = None,
        candidates: int = 8,
        loss: str = "margin_ratio",
        **kwargs: Any,
    ):
        super().__init__(
            model, norm, perturbations=perturbations, loss=loss, **kwargs
        )
        self.candidates = positive_int("candidates", candidates)
        if not self.perturbations.categories:
            raise ValueError(
                "The attack `switch` is for an attacker with `categories`; "
                "use apgd-ce or pgd for others. "
                f"Received: `perturbations={self.perturbations!r}`"
            )
        reach = self.perturbations.reach(self.input_shape)
        self._reach = reach.reshape(self.input_shape)
        self._moves = None
        if reach.any():
            # It leaves categories as they are.
            self._moves = AdaptivePGD(
                model, perturbations=self.attacker, loss=loss, seed=self.seed
            )

    def run(self, x, labels, rho, targets, restart):
        best = np.full(len(x), -np.inf)
        points, moves = x.copy(), np.zeros_like(x)
        for number in range(_ROUNDS):
            rows, left = self._rows(x, labels, rho, targets, moves)
            for rank in range(rows.shape[1]):
                found = rows[:, rank]
                if self._moves is not None:
                    found = self._moves.run(
                        found,
                        labels,
                        left[:, rank],
                        targets,
                        _ROUNDS * restart + number,
                    ).numpy()
                value = self._values(found, labels, targets)
                better = value > best
                best = np.maximum(best, value)
                points[better] = found[better]
                moves[better] = (found - rows[:, rank])[better]
            if self._moves is None or np.isinf(best).all():
                break
        return tf.constant(points)

    def _values(self, points, labels, targets) -> np.ndarray:
        """Losses [n] of points, infinite where the attack has won."""
        parts = []
        for first in range(0, len(points), self.batch_size):
            some = slice(first, first + self.batch_size)
            value, won = self._judge(
                points[some],
                labels[some],
                None if targets is None else targets[some],
            )
            parts.append(np.where(won.numpy(), np.inf, value.numpy()))
        return np.concatenate(parts)

    def _rows(self, x, labels, rho, targets, moves):
        """The rows [n, C, *features] to go on from, and what is left of rho.

        They are ranked by the loss at the moves of the last round, shortened
        to what the switches leave.
        """
        room = self.perturbations.room(tf.constant(x))
        assert room is not None  # there are categories
        up, down = (part.numpy().reshape(len(x), -1) for part in room)
        weights = np.where(self._reach > 0, 1.0, 0.0)
        weights /= np.where(self._reach > 0, self._reach, 1.0)
        spent = np.abs(moves * weights).reshape(len(x), -1).sum(axis=1)
        chosen, left = [], []
        for number in range(len(x)):
            own = slice(number, number + 1)
            class_ = None if targets is None else targets[own]

            def values(rows, prices, own=own, class_=class_):
                share = np.clip(
                    (rho[own] - prices) / np.maximum(spent[own], 1e-12), 0, 1
                )
                shape = [-1] + [1] * (x.ndim - 1)
                tried = rows.reshape(-1, *x.shape[1:])
                tried = tried + share.reshape(shape) * moves[own]
                count = len(tried)
                return self._values(
                    tried.astype("float32"),
                    np.repeat(labels[own], count),
                    None if class_ is None else np.repeat(class_, count),
                )

            rows, prices = self._reachable(
                x[number].reshape(-1),
                float(rho[number]),
                (up[number], down[number]),
                values,
            )
            order = np.argsort(-values(rows, prices), kind="stable")
            order = np.resize(order[: self.candidates], self.candidates)
            chosen.append(rows[order].reshape(-1, *x.shape[1:]))
            left.append(np.maximum(rho[number] - prices[order], 0.0))
        return np.stack(chosen), np.stack(left).astype("float32")

    def _reachable(self, row, rho, room, values):
        groups = self.perturbations.categories
        found = switched_rows(groups, row, rho, room, _ENUMERATED)
        if found is not None:
            return found
        rows, prices = [row], [0.0]
        best, spent = row, 0.0
        left = list(groups)
        while left:
            tried = single_switches(left, best, rho - spent, room, row)
            if not tried:
                break
            some = np.stack([other for other, _, _ in tried])
            costs = spent + np.array([price for _, price, _ in tried])
            rows += list(some)
            prices += list(costs)
            winner = int(np.argmax(values(some, costs)))
            best, spent = some[winner], costs[winner]
            left.remove(tried[winner][2])
        return np.stack(rows), np.array(prices)
