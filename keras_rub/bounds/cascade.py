"""Certificates of one batch: methods one after another, cheap ones first."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_rub.bounds import decision
from keras_rub.bounds.compiled import CompiledBounds
from keras_rub.bounds.methods import Method


class Cascade:
    """Runs the stages of a method on a batch.

    Args:
        bounds: the compiled bounds of a model.
        method: what to run.
        decide_only: bool. Whether a sample is left alone as soon as it is
            decided.
    """

    def __init__(
        self, bounds: CompiledBounds, method: Method, decide_only: bool = False
    ):
        bounds.check_memory(method)
        self.bounds = bounds
        self.method = method
        self.decide_only = decide_only
        self.stages = method.stages_for(bounds.perturbations.norm)

    def run(
        self, x: np.ndarray, labels: np.ndarray, rho: np.ndarray
    ) -> dict[str, Any]:
        """All arrays of a `Certificate` for one batch.

        Args:
            x: array [batch, *features].
            labels: int32 array [batch].
            rho: array [batch].
        """
        logits = self.bounds.logits(x).numpy()
        predicted = logits.argmax(axis=-1)
        predicted[~np.isfinite(logits).all(axis=-1)] = -1
        batch = _Batch(
            x,
            labels,
            rho,
            predicted == labels,
            self.bounds.allowance(x, labels, rho).numpy(),
        )
        for stage in self.stages:
            if stage.in_graph:
                self._run_bound(stage, batch)
            else:
                self._run_search(stage, batch)
        competitors = self.bounds.problem.competitors(tf.constant(labels))
        certified = batch.proved & batch.correct
        return {
            "margins": competitors.to_classes(
                tf.constant(batch.margins)
            ).numpy(),
            "certified": certified,
            "predicted": predicted,
            "labels": np.asarray(labels),
            "decided_by": np.array(
                [
                    name if yes else ""
                    for name, yes in zip(
                        batch.decided_by, certified, strict=True
                    )
                ]
            ),
        }

    def radius(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        tolerance: float,
        max_radius: float,
    ) -> np.ndarray:
        """The largest radii [batch] that are certified.

        Args:
            x: array [batch, *features].
            labels: int32 array [batch].
            tolerance: as in `keras_rub.certified_radius`.
            max_radius: as in `keras_rub.certified_radius`.
        """
        deciding = Cascade(self.bounds, self.method, decide_only=True)
        usable = deciding.run(x, labels, np.zeros(len(x), x.dtype))
        single = len(self.stages) == 1 and self.stages[0].in_graph

        def prove(rows, rho, witnesses):
            rows, rho = rows.numpy(), rho.numpy().astype(x.dtype)
            if single:
                found = self.bounds.decide(self.stages[0])(
                    x[rows], labels[rows], rho, witnesses
                )
                return found.proved, found.witnesses
            certified = deciding.run(x[rows], labels[rows], rho)["certified"]
            return tf.constant(certified), witnesses

        return decision.largest_radius(
            prove,
            tf.constant(usable["certified"]),
            decision.no_witnesses(
                self.bounds.problem, self.stages[0], len(labels)
            ),
            tolerance,
            max_radius,
        ).numpy()

    def _run_bound(self, stage: Method, batch: _Batch) -> None:
        """One call of a bound that is a single function."""
        active = np.arange(len(batch.labels))
        if self.decide_only:
            active = np.flatnonzero(batch.correct & ~batch.proved)
        if not len(active):
            return
        data = batch.take(active)
        if self.decide_only and stage.uses_vertices:
            empty = decision.no_witnesses(
                self.bounds.problem, stage, len(active)
            )
            margins = self.bounds.decide(stage)(*data, empty).margins
        else:
            margins = self.bounds.margins(stage)(*data)
        batch.lower(stage.name, margins.numpy(), active)

    def _run_search(self, stage: Method, batch: _Batch) -> None:
        """alpha-RUB on the margins that are open."""
        # Those that "rub" left open, so that the result is never above that
        # of "alpha-rub" alone; or just those that nothing has decided.
        base = self.stages[0]
        margins = batch.margins if self.decide_only else batch.by[base.name]
        open_ = ~decision.is_negative(margins, batch.allowance)
        wanted = batch.correct & open_.any(axis=-1)
        # Which they are is not known where "rub" stopped early.
        unknown = np.flatnonzero(wanted & np.isinf(margins).any(axis=-1))
        if len(unknown):
            found = self.bounds.margins(base)(*batch.take(unknown))
            batch.lower(base.name, found.numpy(), unknown)
            open_ = ~decision.is_negative(batch.margins, batch.allowance)
        rows, columns = np.nonzero(wanted[:, None] & open_)
        # As many pairs at once as there are samples in a batch.
        size = len(batch.labels)
        for first in range(0, len(rows), size):
            some = slice(first, first + size)
            x, labels, rho = batch.take(rows[some])
            found = self.bounds.lower_line(
                tf.constant(x),
                tf.constant(labels),
                tf.constant(rho),
                tf.constant(columns[some].astype("int32")),
            )
            batch.lower(stage.name, found.numpy(), rows[some], columns[some])


class _Batch:
    """Margins of a batch while methods lower them one after another."""

    def __init__(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        rho: np.ndarray,
        correct: np.ndarray,
        allowance: np.ndarray,
    ):
        self.x, self.labels, self.rho = x, labels, rho
        self.correct = correct
        self.allowance = allowance
        self.margins = np.full_like(allowance, np.inf)
        self.decided_by = [""] * len(labels)
        self.by: dict[str, np.ndarray] = {}  # margins after each stage

    @property
    def proved(self) -> np.ndarray:
        return decision.is_proved(self.margins, self.allowance).numpy()

    def take(self, rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.x[rows], self.labels[rows], self.rho[rows]

    def lower(self, name, margins, *where) -> None:
        """Takes over smaller margins at rows, or at rows and columns."""
        before = self.proved
        margins = np.where(np.isnan(margins), np.inf, margins)
        self.margins[where] = np.minimum(self.margins[where], margins)
        for row in np.flatnonzero(self.proved & ~before):
            self.decided_by[row] = name
        self.by[name] = self.margins.copy()
