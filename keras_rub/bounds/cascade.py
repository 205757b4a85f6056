"""Certificates of one batch: methods one after another, cheap ones first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_rub.bounds import decision, radii
from keras_rub.bounds.compiled import CompiledBounds
from keras_rub.bounds.methods import Method
from keras_rub.categories import switched_rows

# A sample is split into the rows that switches reach if they are at most so
# many; so many of them are worked on together.
_SWITCHED = 512
_TOGETHER = 256

# Samples and competitors that a search works on together.
_PAIRS = 64


class Cascade:
    """Runs the stages of a method on a batch.

    Args:
        bounds: the compiled bounds of a model.
        method: what to run.
        decide_only: bool. Whether a sample is left alone as soon as it is
            decided.
        time_limit: float. Seconds a sample, for a method with a solver.
    """

    def __init__(
        self,
        bounds: CompiledBounds,
        method: Method,
        decide_only: bool = False,
        time_limit: float = 10.0,
    ):
        bounds.check_memory(method)
        self.time_limit = time_limit
        self.bounds = bounds
        self.method = method
        self.decide_only = decide_only
        self.stages = method.stages_for(bounds.perturbations.norm)
        self.interval_layers = bounds.problem.interval_layers(
            self.stages[-1].ranges, self.stages[-1].uses_vertices
        )

    def run(
        self, x: np.ndarray, labels: np.ndarray, rho: np.ndarray
    ) -> dict[str, Any]:
        """All arrays of a `Certificate` for one batch.

        Args:
            x: array [batch, *features].
            labels: int32 array [batch].
            rho: array [batch].
        """
        batch = self.decided(x, labels, rho)
        competitors = self.bounds.problem.competitors(tf.constant(labels))
        certified = batch.proved & batch.correct
        points = {"counterexamples": batch.points} if self.shows else {}
        return {
            "margins": competitors.to_classes(
                tf.constant(batch.margins)
            ).numpy(),
            "certified": certified,
            "broken": batch.broken | (batch.predicted != labels),
            "predicted": batch.predicted,
            "labels": np.asarray(labels),
            "decided_by": np.array(
                [
                    name if yes else ""
                    for name, yes in zip(
                        batch.decided_by, certified, strict=True
                    )
                ]
            ),
            **points,
        }

    def decided(
        self, x: np.ndarray, labels: np.ndarray, rho: np.ndarray
    ) -> _Batch:
        """The batch, after all stages; arguments as of `run`."""
        logits = self.bounds.logits(x).numpy()
        predicted = logits.argmax(axis=-1)
        predicted[~np.isfinite(logits).all(axis=-1)] = -1
        batch = _Batch(
            x,
            labels,
            rho,
            predicted,
            self.bounds.allowance(x, labels, rho).numpy(),
        )
        for stage in self.stages:
            if stage.solver is not None:
                self._run_solver(stage, batch)
            elif stage.in_graph:
                self._run_bound(stage, batch)
            else:
                self._run_search(stage, batch)
        if self.splits:
            self._split(batch)
        return batch

    @property
    def splits(self) -> bool:
        """Whether open samples are split into the rows of their switches."""
        categories = self.bounds.perturbations.categories
        return bool(categories) and self.stages[-1].solver is None

    @property
    def shows(self) -> bool:
        """Whether the method finds counterexamples."""
        return self.splits or self.stages[-1].solver is not None

    def radius(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        tolerance: float,
        max_radius: float,
    ) -> np.ndarray:
        """The largest radii [batch] that are certified.

        The first stage, which is cheap, is searched alone. The others begin
        where it ends, and at a guess of how far they get; each radius that
        counts is then decided by all of them together.

        Args:
            x: array [batch, *features].
            labels: int32 array [batch].
            tolerance: as in `keras_rub.certified_radius`.
            max_radius: as in `keras_rub.certified_radius`.
        """
        first = self.stages[0]
        limits = (tolerance, max_radius)
        if self.stages[-1].solver is not None:
            return self._distance(x, labels, *limits)
        start = self.bounds.find_radius(first)(x, labels, *limits)
        if len(self.stages) == 1 and not self.splits:
            return start.radius.numpy()
        usable, radius = start.usable.numpy(), start.radius.numpy()
        guess = radius.copy()
        for stage in self.stages[1:]:
            if stage.in_graph:
                self._extend(stage, x, labels, radius, *limits)
                guess = np.maximum(guess, radius)
            elif stage.uses_vertices:
                found = self._guess_by_search(
                    stage, x, labels, radius, start.witnesses, max_radius
                )
                guess = np.maximum(guess, found)
        deciding = Cascade(self.bounds, self.method, decide_only=True)

        def prove(rows, rho):
            rows, rho = rows.numpy(), rho.numpy().astype(x.dtype)
            found = deciding.run(x[rows], labels[rows], rho)
            return tf.constant(found["certified"])

        return radii.largest_radius(
            prove, tf.constant(usable), guess, *limits, proved=radius
        ).numpy()

    def _distance(self, x, labels, tolerance, max_radius) -> np.ndarray:
        """Radii [batch] by a solver, which begins where the bounds end."""
        *names, last = (stage.name for stage in self.stages)
        norm = self.bounds.perturbations.norm
        bounds = Method("bounds", stages={norm: tuple(names)})
        radius = Cascade(self.bounds, bounds).radius(
            x, labels, tolerance, max_radius
        )
        solver = self.bounds.solver(self.stages[-1])
        for row in np.flatnonzero(
            self.bounds.logits(x).numpy().argmax(axis=-1) == labels
        ):
            radius[row] = solver.distance(
                x[row],
                labels[row],
                radius[row],
                tolerance,
                max_radius,
                self.time_limit,
            )
        return radius

    def _extend(self, stage, x, labels, radius, tolerance, max_radius) -> None:
        """Raises radii [batch], in place, where this stage proves more."""
        beyond = (radius * (1.0 + tolerance)).astype(x.dtype)
        tried = np.flatnonzero((radius > 0) & (radius < max_radius))
        if not len(tried):
            return
        data = x[tried], labels[tried], beyond[tried]
        yes = decision.is_proved(
            self.bounds.margins(stage)(*data), self.bounds.allowance(*data)
        )
        rows = tried[yes.numpy()]
        if len(rows):
            found = self.bounds.find_radius(stage)(
                x[rows], labels[rows], tolerance, max_radius
            )
            radius[rows] = np.maximum(radius[rows], found.radius)

    def _guess_by_search(
        self, stage, x, labels, radius, witnesses, max_radius
    ) -> np.ndarray:
        """About the radii [batch] that alpha-RUB proves.

        The competitor that ends each radius is looked at first, then those
        that would end the one that results.
        """
        guess = radius.copy()
        rows = np.flatnonzero((radius > 0) & (radius < max_radius))
        if not len(rows):
            return guess

        def margins():
            return self.bounds.margins_at(
                x[rows],
                labels[rows],
                guess[rows].astype(x.dtype),
                tf.gather(witnesses, rows),
            ).numpy()

        def radius_of(where, columns, limits):
            some = rows[where]
            data = (x[some], labels[some], radius[some].astype(x.dtype))
            return _in_parts(
                self.bounds.search(stage).guess_radius,
                *data,
                columns.astype("int32"),
                limits.astype(x.dtype),
            )

        everyone = np.arange(len(rows))
        worst = margins().argmax(axis=-1)
        limits = np.full(len(rows), max_radius)
        guess[rows] = radius_of(everyone, worst, limits)
        others = margins() >= 0
        others[everyone, worst] = False
        where, columns = np.nonzero(others)
        found = radius_of(where, columns, guess[rows[where]])
        np.minimum.at(guess, rows[where], found)
        return guess

    def _run_bound(self, stage: Method, batch: _Batch) -> None:
        """One call of a bound that is a single function."""
        active = np.arange(len(batch.labels))
        if self.decide_only:
            active = np.flatnonzero(batch.correct & ~batch.proved)
        if not len(active):
            return
        data = batch.take(active)
        if self.decide_only and stage.uses_vertices:
            margins = self.bounds.decide(stage)(*data).margins
        else:
            margins = self.bounds.margins(stage)(*data)
        batch.lower(stage.name, margins.numpy(), active)

    def _run_search(self, stage: Method, batch: _Batch) -> None:
        """A search on the margins that are open."""
        # Those that the bound it begins with left open, so that the result is
        # never above that of the search alone; or just those that nothing has
        # decided.
        base = stage.stages_for(self.bounds.perturbations.norm)[0]
        margins = batch.margins if self.decide_only else batch.by[base.name]
        open_ = ~decision.is_negative(margins, batch.allowance)
        wanted = batch.correct & open_.any(axis=-1)
        # Which they are is not known where a bound stopped early.
        unknown = np.flatnonzero(wanted & np.isinf(margins).any(axis=-1))
        if len(unknown):
            found = self.bounds.margins(base)(*batch.take(unknown))
            batch.lower(base.name, found.numpy(), unknown)
            open_ = ~decision.is_negative(batch.margins, batch.allowance)
        open_ &= wanted[:, None]
        if self.decide_only:
            # The worst one first: where it stays open, so does the sample.
            rows = np.flatnonzero(wanted)
            worst = np.where(open_, batch.margins, -np.inf)[rows].argmax(-1)
            self._lower(stage, batch, rows, worst)
            lowered = decision.is_negative(batch.margins, batch.allowance)
            open_[rows] &= lowered[rows, worst, None]
            open_[rows, worst] = False
        self._lower(stage, batch, *np.nonzero(open_))

    def _run_solver(self, stage: Method, batch: _Batch) -> None:
        """A solver on the samples that are open, one by one."""
        solver = self.bounds.solver(stage)
        count = solver.problem.program.num_classes
        for row in np.flatnonzero(batch.correct & ~batch.proved):
            open_ = ~decision.is_negative(
                batch.margins[row], batch.allowance[row]
            )
            # The competitor that looks worst is the first.
            order = np.argsort(-batch.margins[row])
            rivals = [
                (batch.labels[row] + 1 + competitor) % count
                for competitor in order
                if open_[competitor]
            ]
            found = solver.decide(
                batch.x[row],
                batch.labels[row],
                batch.rho[row],
                rivals,
                self.time_limit,
            )
            if found.proved:
                batch.accept(row, stage.name)
            elif found.broken:
                batch.reject(row, found.point)

    def _split(self, batch: _Batch) -> None:
        """Open samples as the rows that switches alone reach.

        Every point of the set has the categories of one of these rows, and
        is reached from there by free moves within what the switches leave of
        the radius. So the sample is proved where all rows are.
        """
        owners, rows, radii = self._switched(batch)
        if not len(owners):
            return
        labels = batch.labels[owners]
        for first in range(0, len(owners), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            logits = self.bounds.logits(rows[some]).numpy()
            own = logits[np.arange(len(logits)), labels[some]]
            for number in np.flatnonzero(logits.max(axis=-1) > own):
                owner = owners[some][number]
                if not batch.broken[owner]:
                    batch.reject(owner, rows[some][number])
        bounds = self.bounds.without_switches
        cascade = Cascade(bounds, self.method, self.decide_only)
        failed = batch.broken.copy()
        names = np.full(len(batch.labels), "", dtype=object)
        margins = np.full_like(batch.margins, -np.inf)
        for first in range(0, len(owners), _TOGETHER):
            left = np.arange(first, min(first + _TOGETHER, len(owners)))
            left = left[~failed[owners[left]]]
            if not len(left):
                continue
            found = cascade.decided(rows[left], labels[left], radii[left])
            np.maximum.at(margins, owners[left], found.margins)
            proved = found.proved & found.correct
            failed[owners[left][~proved]] = True
            for owner, name in zip(owners[left], found.decided_by, strict=True):
                names[owner] = name
        done = np.setdiff1d(np.unique(owners), np.flatnonzero(failed))
        batch.margins[done] = np.minimum(batch.margins[done], margins[done])
        for owner in done:
            batch.accept(owner, names[owner])

    def _switched(self, batch: _Batch):
        """The rows of open samples, whose they are, and what is left of rho."""
        attacker = self.bounds.perturbations
        room = attacker.room(tf.constant(batch.x))
        assert room is not None  # there are categories
        up, down = (part.numpy().reshape(len(batch.x), -1) for part in room)
        owners, rows, radii = [], [], []
        for row in np.flatnonzero(batch.correct & ~batch.proved):
            rho = float(batch.rho[row])
            found = switched_rows(
                attacker.categories,
                batch.x[row].reshape(-1),
                rho,
                (up[row], down[row]),
                _SWITCHED,
            )
            if found is not None:
                owners += [row] * len(found[0])
                rows.append(found[0])
                # A little more, so that rounding never makes it less.
                radii.append(np.maximum(rho - found[1], 0.0) + 1e-6 * rho)
        if not owners:
            return np.zeros(0, int), batch.x[:0], batch.rho[:0]
        return (
            np.array(owners),
            np.concatenate(rows).reshape(-1, *batch.x.shape[1:]),
            np.concatenate(radii).astype(batch.rho.dtype),
        )

    def _lower(self, stage, batch, rows, columns) -> None:
        """A search on these samples and competitors."""
        data = [*batch.take(rows), columns.astype("int32")]
        if self.decide_only:
            data.append(-batch.allowance[rows, columns])
        found = _in_parts(self.bounds.search(stage), *data)
        batch.lower(stage.name, found, rows, columns)


def _in_parts(
    function: Callable[..., tf.Tensor], *arrays: np.ndarray
) -> np.ndarray:
    """`function` of some rows of the arrays at a time."""
    parts = [np.zeros(0, arrays[0].dtype)]
    for first in range(0, len(arrays[0]), _PAIRS):
        some = slice(first, first + _PAIRS)
        parts.append(
            function(*(tf.constant(array[some]) for array in arrays)).numpy()
        )
    return np.concatenate(parts)


class _Batch:
    """Margins of a batch while methods lower them one after another."""

    def __init__(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        rho: np.ndarray,
        predicted: np.ndarray,
        allowance: np.ndarray,
    ):
        self.x, self.labels, self.rho = x, labels, rho
        self.predicted = predicted
        self.correct = predicted == labels
        self.allowance = allowance
        self.margins = np.full_like(allowance, np.inf)
        self.decided_by = [""] * len(labels)
        self.by: dict[str, np.ndarray] = {}  # margins of each stage alone
        # What is known by other means than margins.
        self.accepted = np.zeros(len(labels), bool)
        self.broken = np.zeros(len(labels), bool)
        self.points = np.array(x, "float32")

    @property
    def proved(self) -> np.ndarray:
        by_margins = decision.is_proved(self.margins, self.allowance).numpy()
        return by_margins | self.accepted

    def accept(self, row: np.integer, name: str) -> None:
        """Notes that a sample is proved, and by what."""
        self.accepted[row] = True
        self.decided_by[row] = name

    def reject(self, row: np.integer, point: np.ndarray) -> None:
        """Notes a counterexample."""
        self.broken[row] = True
        self.points[row] = point

    def take(self, rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.x[rows], self.labels[rows], self.rho[rows]

    def lower(self, name, margins, *where) -> None:
        """Takes over smaller margins at rows, or at rows and columns."""
        before = self.proved
        margins = np.where(np.isnan(margins), np.inf, margins)
        self.margins[where] = np.minimum(self.margins[where], margins)
        for row in np.flatnonzero(self.proved & ~before):
            self.decided_by[row] = name
        own = self.by.setdefault(name, np.full_like(self.margins, np.inf))
        own[where] = margins
