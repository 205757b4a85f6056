"""The exact method: a small network as a mixed-integer program.

Affine maps are linear constraints. An activation of two rays (the ReLU family)
is one binary variable where its input can have both signs, a switch is a binary
variable, and the steps of an ordinal column are an integer one. HiGHS (in
scipy) then finds a point of the set at which a margin reaches 0, or proves that
there is none.

The solver works with tolerances. `Encoding.slack` bounds what they can do to a
margin, from layer to layer. A certificate says that no point has a margin of
more than minus that slack and the allowance for float32. A counterexample is
one that the network itself, in float32, classifies otherwise. What lies between
is not decided.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_rub.bounds.piecewise import Piecewise, Room
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.silence import without_lines
from keras_rub.categories import Category, is_affordable, switched_rows
from keras_rub.perturbations import PerturbationSet
from keras_rub.tracing import compiled

# The solver's own tolerance of a constraint and of an integer, times 2.
_TOLERANCE = 2e-6

# How a range grows, so that rounding can't cut a value off.
_WIDER = 1e-6

# A gap so large that the first solution ends the search.
_ANY_SOLUTION = 1e9

# Where no counterexample is known, a search for the distance looks this much
# further than is proved.
_FURTHER = 2.0

# The least radius that is looked at.
_LEAST = 1e-3

# Halvings between what is proved and what is known to be broken.
_HALVINGS = 6

# Rows that switches reach, to look for counterexamples in.
_SWITCHED = 512

# What HiGHS prints whatever its options say.
_CHATTER = b"HighsMipSolverData::"


class Found(NamedTuple):
    """What is known of one sample: `proved` and `broken` are never both true.

    `point` [*features] is the counterexample of a broken sample.
    """

    proved: bool
    broken: bool
    point: np.ndarray | None = None


class ExactSolver:
    """Decides samples of one problem, and finds their distances.

    Args:
        problem: a network of affine maps and activations of two rays, and an
            attacker of norm 1 or inf.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.size = int(np.prod(problem.program.input_shape))
        self.read()
        point = [None, *problem.program.input_shape]
        self._ranges = compiled(
            self._ranges_traced,
            input_signature=[
                tf.TensorSpec(point, tf.float64),
                tf.TensorSpec([None], tf.float64),
            ],
        )
        single = tf.TensorSpec(point, tf.float32)
        self._logits = compiled(problem.logits, input_signature=[single])
        self._allowance = compiled(
            problem.allowance,
            input_signature=[
                single,
                tf.TensorSpec([None], tf.int32),
                tf.TensorSpec([None], tf.float32),
            ],
        )

    def read(self) -> None:
        """Reads the weights, which may have changed since."""
        self.network = Piecewise(self.problem)
        self.units = self.network.units

    def _ranges_traced(self, x, rho):
        relaxation = self.problem.linear(x, rho, "crown")
        found = [relaxation.intervals[unit.source] for unit in self.units]
        return [
            tf.reshape(end, [tf.shape(x)[0], -1])
            for interval in found
            for end in interval
        ]

    def ranges(
        self, x: np.ndarray, rho: float
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where the inputs of all units lie, for one sample."""
        found = [
            end.numpy()[0]
            for end in self._ranges(
                tf.constant(x[None], tf.float64), tf.constant([rho], tf.float64)
            )
        ]
        pairs = []
        for low, high in zip(found[::2], found[1::2], strict=True):
            wider = _WIDER * (1.0 + np.abs(low) + np.abs(high))
            pairs.append((low - wider, high + wider))
        return pairs

    def decide(
        self,
        x: np.ndarray,
        label: int,
        rho: float,
        rivals: Iterable[int],
        time_limit: float,
    ) -> Found:
        """Whether a point within the radius gets another class.

        Args:
            x: array [*features].
            label: int. The class that is predicted for x.
            rho: float.
            rivals: the classes that are not ruled out yet.
            time_limit: float. Seconds.
        """
        rivals = list(rivals)
        point = self.climb(x, label, float(rho), rivals)
        if point is not None:
            return Found(False, True, point)
        encoding = Encoding(self, x, float(rho))
        allowance = self.allowance(x, label, float(rho))
        # What was compiled for the first sample is not the solver's time.
        end = time.monotonic() + time_limit
        proved = True
        for rival in rivals:
            row, height = self.network.margin(label, rival)
            slack = encoding.slack(row) + allowance[rival]
            for gap, least in ((_ANY_SOLUTION, -slack), (1e-4, slack)):
                found = encoding.solve(
                    -row, row, least - height, gap, end - time.monotonic()
                )
                if found.impossible:
                    # Ruled out, or within the tolerance of a tie.
                    proved &= least < 0
                    break
                point = self._broken(x, label, rho, found.point)
                if point is not None:
                    return Found(False, True, point)
                if found.timed_out:
                    proved = False
                    break
            else:
                proved = False
        return Found(proved, False)

    def distance(
        self,
        x: np.ndarray,
        label: int,
        proved: float,
        tolerance: float,
        max_radius: float,
        time_limit: float,
    ) -> float:
        """The largest radius within which the class is proved to stay.

        Within `tolerance` of the distance of the nearest point of another
        class, where time allows.

        Args:
            x: array [*features].
            label: int. The class that is predicted for x.
            proved: float. A radius that is proved already.
            tolerance: float. Relative.
            max_radius: float. Larger radii are returned as this.
            time_limit: float. Seconds.
        """
        self.ranges(x, proved)
        self.allowance(x, label, proved)
        end = time.monotonic() + time_limit  # not that of compiling
        classes = range(self.problem.program.num_classes)
        rivals = [rival for rival in classes if rival != label]
        high = self._broken_at(x, label, proved, max_radius, rivals)
        # A climb often ends next to the nearest point.
        radius = high * (1.0 - 0.9 * tolerance)
        while proved < max_radius and (
            np.isinf(high) or high - proved > tolerance * high
        ):
            left = end - time.monotonic()
            if left <= 0:
                break
            if np.isinf(high):
                radius = min(max(_FURTHER * proved, _LEAST), max_radius)
            elif not proved < radius < high:
                radius = (proved + high) / 2
            if self.decide(x, label, radius, rivals, left / 2).proved:
                proved = radius
            else:
                high = radius
        return float(proved)

    def climb(
        self, x: np.ndarray, label: int, rho: float, rivals: Iterable[int]
    ) -> np.ndarray | None:
        """A counterexample [*features] that is found without a search."""
        attacker, flat = self.problem.perturbations, x.reshape(-1)
        up, down = room_of(attacker, x)
        rows, spent = flat[None], np.zeros(1)
        if attacker.categories:
            found = switched_rows(
                attacker.categories, flat, rho, (up, down), _SWITCHED
            )
            if found is not None:
                rows, spent = found
        room = Room(attacker.reach(x.shape), up, down, attacker.norm)
        radii = np.maximum(rho - spent, 0.0)
        for rival in rivals:
            row, _ = self.network.margin(label, rival)
            end = self.network.climb(row, rows.astype("float64"), radii, room)
            point = self._broken(x, label, rho, end)
            if point is not None:
                return point
        return None

    def _broken_at(self, x, label, proved, max_radius, rivals) -> float:
        """A radius at which there is a counterexample; infinite if unknown."""
        low, high = proved, max(proved, _LEAST)
        while low < max_radius:
            high = min(_FURTHER * high, max_radius)
            if self.climb(x, label, high, rivals) is not None:
                break
            low = high
        else:
            return np.inf
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.climb(x, label, middle, rivals) is None:
                low = middle
            else:
                high = middle
        return high

    def allowance(self, x: np.ndarray, label: int, rho: float) -> np.ndarray:
        """What float32 can do to the margins [K] of one sample."""
        found = self._allowance(
            tf.constant(x[None], tf.float32),
            tf.constant([label], tf.int32),
            tf.constant([rho], tf.float32),
        ).numpy()[0]
        # By competitor, of which the first follows the label.
        return np.roll(np.concatenate([[0.0], found]), label)

    def _broken(self, x, label, rho, point) -> np.ndarray | None:
        """The point in float32, if it proves that the sample can be broken."""
        if point is None:
            return None
        point = point.reshape(x.shape).astype("float32")
        logits = self._logits(tf.constant(point[None])).numpy()[0]
        # A tie is not enough: how it is broken depends on rounding.
        if not np.delete(logits, label).max() > logits[label]:
            return None
        inside = self.problem.perturbations.contains(
            x[None], point[None], float(rho)
        )
        return point if inside[0] else None


class Solution(NamedTuple):
    """What the solver found out.

    `point` [M] is an input that satisfies the constraints, or `None`. `bound`
    is what the objective can't be below. `impossible` says that no point
    satisfies the constraints.
    """

    point: np.ndarray | None
    bound: float
    impossible: bool
    timed_out: bool


class Encoding:
    """The program of one sample and one radius.

    Args:
        solver: the network.
        x: array [*features].
        rho: float. The radius within which the constraints hold.
    """

    def __init__(self, solver: ExactSolver, x: np.ndarray, rho: float):
        self.solver, self.rho = solver, rho
        self.x = x.astype("float64").reshape(-1)
        self.attacker = solver.problem.perturbations
        self.shape = x.shape
        # A variable is a pair of limits; those of inputs and units come first.
        self.limits: list[tuple[float, float]] = []
        self.whole: list[int] = []
        self.constraints: list[tuple[dict[int, float], float, float]] = []
        self.spent: dict[int, float] = {}
        self.errors = np.zeros(0)
        self.ranges = solver.ranges(x, rho) if solver.units else []
        self._add_inputs_and_units()
        self._add_moves()
        self._add_switches()
        if self.attacker.norm == 1:
            self._add_majorants()
        self._add_activations()
        self.cost = np.zeros(len(self.limits))
        for variable, price in self.spent.items():
            self.cost[variable] = price
        self._matrix = self._assemble()

    def slack(self, row: np.ndarray) -> float:
        """What the solver's tolerances can do to a function of the values."""
        return float(np.abs(row) @ self.errors) + _TOLERANCE

    def solve(
        self,
        objective: np.ndarray,
        row: np.ndarray,
        least: float,
        gap: float,
        seconds: float,
    ) -> Solution:
        """Lowers an objective where `row` times the values is at least so much.

        Args:
            objective: array. Of the first variables, the others count 0.
            row: array, as `objective`.
            least: float.
            gap: float. The relative gap that ends the search.
            seconds: float.
        """
        from scipy import optimize, sparse  # slow to import, seldom needed

        if seconds <= 0:
            return Solution(None, -np.inf, False, True)
        count = len(self.limits)
        objective, row = (
            np.pad(part, (0, count - len(part))) for part in (objective, row)
        )
        matrix, low, high = self._matrix
        with without_lines(_CHATTER):
            found = optimize.milp(
                objective,
                integrality=self._integrality(),
                bounds=optimize.Bounds(*np.array(self.limits).T),
                constraints=[
                    optimize.LinearConstraint(matrix, low, high),
                    optimize.LinearConstraint(
                        sparse.csr_array(row[None]), least, np.inf
                    ),
                ],
                options={"time_limit": seconds, "mip_rel_gap": gap},
            )
        point = None if found.x is None else self._whole_point(found.x)
        bound = getattr(found, "mip_dual_bound", None)
        if found.status == 0 and bound is None:
            bound = found.fun  # a program without integers
        if bound is None or not np.isfinite(bound):
            bound = -np.inf  # nothing is known
        return Solution(
            point,
            float(bound),
            found.status == 2,
            found.status not in (0, 2),
        )

    # Variables and constraints -----------------------------------------------

    def _add(self, low: float, high: float, whole: bool = False) -> int:
        self.limits.append((low, max(high, low)))
        if whole:
            self.whole.append(len(self.limits) - 1)
        return len(self.limits) - 1

    def _add_inputs_and_units(self) -> None:
        for _ in self.x:
            self._add(-np.inf, np.inf)
        for unit in self.solver.units:
            for _ in unit.heights:
                self._add(-np.inf, np.inf)

    def _add_moves(self) -> None:
        """Features that move freely, and those that do not move."""
        reach = self.attacker.reach(self.shape)
        up, down = room_of(self.attacker, self.x.reshape(self.shape))
        steps: list[dict[int, float]] = [{} for _ in self.x]
        if self.attacker.norm == "inf":
            radius = self._add(0.0, self.rho)
            self.spent[radius] = 1.0
        for column in np.flatnonzero(reach):
            most = self.rho * reach[column]
            rise = self._add(0.0, min(most, up[column]))
            fall = self._add(0.0, min(most, down[column]))
            steps[column] = {rise: 1.0, fall: -1.0}
            price = 1.0 / reach[column]
            if self.attacker.norm == "inf":
                self.constraints.append(
                    ({rise: price, fall: price, radius: -1.0}, -np.inf, 0.0)
                )
            else:
                self.spent.update({rise: price, fall: price})
        self._steps = steps

    def _add_switches(self) -> None:
        """Switches and steps; then every input is what its moves make it."""
        up, down = room_of(self.attacker, self.x.reshape(self.shape))
        for group in self.attacker.categories:
            if isinstance(group, Category):
                columns = list(group.columns)
                start = int(self.x[columns].argmax())
                made = {}
                for end, price in enumerate(group.prices[start]):
                    if is_affordable(price, self.rho):
                        switch = self._add(0.0, 1.0, True)
                        made[switch] = 1.0
                        self.spent[switch] = float(price)
                        self._steps[columns[end]] = {switch: 1.0}
                self._steps[columns[start]] = dict.fromkeys(made, -1.0)
                if made:
                    self.constraints.append((made, -np.inf, 1.0))
                continue
            steps = {}
            for sign, room in ((1.0, up), (-1.0, down)):
                most = min(
                    self.rho / group.price, room[group.column] / group.step
                )
                step = self._add(0.0, np.floor(most * (1.0 + _WIDER)), True)
                self.spent[step] = group.price
                steps[step] = sign * group.step
            self._steps[group.column] = steps
        for column, (value, steps) in enumerate(
            zip(self.x, self._steps, strict=True)
        ):
            row = {variable: -step for variable, step in steps.items()}
            self.constraints.append(({column: 1.0, **row}, value, value))
        self.constraints.append(
            (dict(self.spent), -np.inf, self.rho * (1.0 + _WIDER))
        )

    def _add_majorants(self) -> None:
        """Units are below their majorants, as in the RUB bound.

        What is spent on a move, as a share of the radius, is the share of the
        vertex that all of the radius leads to; a convex function is at most the
        mean of its values there. That says more than the chord of a unit, which
        knows nothing of the other units, and narrows the ranges.
        """
        radius = self.rho * (1.0 + _WIDER)
        if not self.spent or not radius:
            return
        moves, prices = map(np.array, zip(*self.spent.items(), strict=True))
        vertices = np.zeros([1 + len(moves), self.x.size])
        place = {move: number for number, move in enumerate(moves, start=1)}
        for column, steps in enumerate(self._steps):
            for move, step in steps.items():
                vertices[place[move], column] = step
        vertices[1:] *= radius / prices[:, None]
        above = vertices + self.x
        below = -above
        first = self.x.size
        for number, unit in enumerate(self.solver.units):
            up, down = np.maximum(unit.rows, 0).T, np.maximum(-unit.rows, 0).T
            highs = above @ up + below @ down + unit.heights
            lows = below @ up + above @ down - unit.heights
            low, high = self.ranges[number]
            wider = _WIDER * (1.0 + np.abs(low) + np.abs(high))
            low = np.maximum(low, -lows.max(axis=0) - wider)
            high = np.minimum(high, highs.max(axis=0) + wider)
            self.ranges[number] = low, high

            def times(slope, highs=highs, lows=lows):
                return (
                    np.maximum(slope, 0) * highs + np.maximum(-slope, 0) * lows
                )

            left, right = unit.rays
            values = np.maximum(times(left), times(right))
            slopes = np.where(high + low > 0, right, left)
            above = np.concatenate([above, values], axis=1)
            below = np.concatenate([below, times(-slopes)], axis=1)
            for column in map(int, np.flatnonzero((low < 0) & (high > 0))):
                start, *ends = values[:, column]
                shares = (np.array(ends) - start) * prices / radius
                row = dict(zip(moves, -shares, strict=True))
                self.constraints.append(
                    (
                        {first + column: 1.0, **row},
                        -np.inf,
                        start + wider[column],
                    )
                )
            first += len(low)

    def _add_activations(self) -> None:
        """Units are `max(left * z, right * z)`, and off by some tolerance."""
        errors = [np.full(self.x.size, _TOLERANCE)]
        first = self.x.size
        for unit, (low, high) in zip(
            self.solver.units, self.ranges, strict=True
        ):
            left, right = unit.rays
            before = np.abs(unit.rows) @ np.concatenate(errors)
            size = 1.0 + np.maximum(np.abs(low), np.abs(high))
            errors.append(
                max(abs(left), abs(right)) * before + _TOLERANCE * size
            )
            for number, (lowest, highest) in enumerate(
                zip(low, high, strict=True)
            ):
                output = first + number
                values = [max(left * z, right * z) for z in (lowest, highest)]
                self.limits[output] = min(*values, 0.0), max(*values, 0.0)
                row, height = unit.rows[number], unit.heights[number]
                inputs = {i: row[i] for i in np.flatnonzero(row)}

                def line(slope, inputs=inputs, output=output):
                    return {
                        output: 1.0,
                        **{i: -slope * v for i, v in inputs.items()},
                    }

                if lowest >= 0 or highest <= 0:
                    slope = right if lowest >= 0 else left
                    self.constraints.append(
                        (line(slope), slope * height, slope * height)
                    )
                    continue
                sign = self._add(0.0, 1.0, True)
                bend = right - left
                self.constraints += [
                    (line(left), left * height, np.inf),
                    (line(right), right * height, np.inf),
                    (
                        {**line(left), sign: -bend * highest},
                        -np.inf,
                        left * height,
                    ),
                    (
                        {**line(right), sign: -bend * lowest},
                        -np.inf,
                        right * height - bend * lowest,
                    ),
                ]
            first += len(low)
        self.errors = np.concatenate(errors)

    def _assemble(self):
        from scipy import sparse  # slow to import, seldom needed

        entries = [
            (number, variable, value)
            for number, (row, _, _) in enumerate(self.constraints)
            for variable, value in row.items()
        ]
        rows, columns, values = map(np.array, zip(*entries, strict=True))
        shape = (len(self.constraints), len(self.limits))
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        low, high = np.array([ends for _, *ends in self.constraints]).T
        return matrix, low, high

    def _integrality(self) -> np.ndarray:
        found = np.zeros(len(self.limits))
        found[self.whole] = 1
        return found

    def _whole_point(self, values: np.ndarray) -> np.ndarray:
        """The input of a solution, with its integers made whole."""
        values = values.copy()
        values[self.whole] = np.round(values[self.whole])
        return np.array(
            [
                start + sum(step * values[v] for v, step in steps.items())
                for start, steps in zip(self.x, self._steps, strict=True)
            ]
        )


def room_of(attacker: PerturbationSet, x: np.ndarray):
    """How far the features [M] of one sample can move up, and down."""
    up = down = np.full(x.size, np.inf)
    if attacker.input_range is not None:
        flat = x.astype("float64").reshape(-1)
        low, high = (
            np.broadcast_to(end, x.shape).reshape(-1)
            for end in attacker.input_range
        )
        up, down = np.maximum(high - flat, 0), np.maximum(flat - low, 0)
    return up, down
