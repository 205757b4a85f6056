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

import dataclasses
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_rub.bounds.problem import Problem
from keras_rub.bounds.program import Affine, Convex
from keras_rub.categories import Category, is_affordable
from keras_rub.tracing import compiled

# The solver's own tolerance of a constraint and of an integer, times 2.
_TOLERANCE = 2e-6

# More units than this make a program that no solver gets through.
_MOST_UNITS = 4096

# How a range grows, so that rounding can't cut a value off.
_WIDER = 1e-6

# A gap so large that the first solution ends the search.
_ANY_SOLUTION = 1e9

# The first search for a distance looks this much further than is proved.
_FURTHER = 2.0


class Found(NamedTuple):
    """What is known of one sample: `proved` and `broken` are never both true.

    `point` [*features] is the counterexample of a broken sample.
    """

    proved: bool
    broken: bool
    point: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Activations whose inputs are affine in what comes before.

    `rows` [w, n] and `heights` [w] say how; n counts the inputs and all
    earlier units. `source` is the value that they read.
    """

    rows: np.ndarray
    heights: np.ndarray
    rays: tuple[float, float]
    source: int


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
        self.units, self.rows, self.heights = _read(self.problem)

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
        end = time.monotonic() + time_limit
        encoding = Encoding(self, x, float(rho))
        allowance = self.allowance(x, label, float(rho))
        proved = True
        for rival in rivals:
            row, height = self.margin(label, rival)
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
        end = time.monotonic() + time_limit
        classes = range(self.problem.program.num_classes)
        rivals = [rival for rival in classes if rival != label]
        reach = min(max(_FURTHER * proved, 1e-3), max_radius)
        while proved < max_radius:
            encoding = Encoding(self, x, reach)
            allowance = self.allowance(x, label, reach)
            nearest = reach
            for rival in rivals:
                row, height = self.margin(label, rival)
                found = encoding.solve(
                    encoding.cost,
                    row,
                    -encoding.slack(row) - allowance[rival] - height,
                    0.1 * tolerance,
                    end - time.monotonic(),
                )
                if not found.impossible:
                    nearest = min(nearest, found.bound)
            proved = max(proved, nearest * (1.0 - _WIDER) - _TOLERANCE)
            if nearest < reach or time.monotonic() > end:
                break
            if reach >= max_radius:
                return max_radius
            reach = min(_FURTHER * reach, max_radius)
        return float(proved)

    def margin(self, label: int, rival: int) -> tuple[np.ndarray, float]:
        """`z_rival - z_label` as a function of inputs and units."""
        return (
            self.rows[rival] - self.rows[label],
            float(self.heights[rival] - self.heights[label]),
        )

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
        for unit, (low, high) in zip(
            self.solver.units, self.ranges, strict=True
        ):
            left, right = unit.rays
            for ends in zip(low, high, strict=True):
                values = [max(left * end, right * end) for end in ends]
                self._add(min(*values, 0.0), max(*values, 0.0))

    def _room(self) -> tuple[np.ndarray, np.ndarray]:
        up = down = np.full(self.x.size, np.inf)
        if self.attacker.input_range is not None:
            low, high = (
                np.broadcast_to(end, self.shape).reshape(-1)
                for end in self.attacker.input_range
            )
            up, down = np.maximum(high - self.x, 0), np.maximum(self.x - low, 0)
        return up, down

    def _add_moves(self) -> None:
        """Features that move freely, and those that do not move."""
        reach = self.attacker.reach(self.shape)
        up, down = self._room()
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
        up, down = self._room()
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


def _read(problem: Problem) -> tuple[list[_Unit], np.ndarray, np.ndarray]:
    """The units of a network, and its logits as functions of all before."""
    program = problem.program
    size = int(np.prod(program.input_shape))
    # Each value as [1 + n, ...]: a constant, then its slopes by n variables.
    values: dict[int, np.ndarray] = {
        0: np.concatenate([np.zeros([1, size]), np.eye(size)]).reshape(
            -1, *program.input_shape
        )
    }
    units: list[_Unit] = []
    count = size
    for operation in program.operations:
        inputs = [
            np.pad(
                values[index],
                [(0, 1 + count - len(values[index]))]
                + [(0, 0)] * (values[index].ndim - 1),
            )
            for index in operation.inputs
        ]
        if isinstance(operation, Affine):
            tensors = [tf.constant(part, tf.float64) for part in inputs]
            found = operation.apply(*tensors).numpy()
            zeros = [tf.zeros_like(part[:1]) for part in tensors]
            found[1:] -= operation.apply(*zeros).numpy()
            values[operation.output] = found
            continue
        if not isinstance(operation, Convex) or not operation.activation.rays:
            raise ValueError(
                '`method="exact"` needs affine layers and activations like '
                f"ReLU and LeakyReLU only. Received: layer {operation.layer!r}"
            )
        (source,) = inputs
        flat = source.reshape(1 + count, -1)
        width = flat.shape[1]
        units.append(
            _Unit(
                flat[1:].T.copy(),
                flat[0].copy(),
                operation.activation.rays,
                operation.inputs[0],
            )
        )
        new = np.zeros([1 + count + width, width])
        new[1 + count :] = np.eye(width)
        values[operation.output] = new.reshape(-1, *source.shape[1:])
        count += width
        if count - size > _MOST_UNITS:
            raise ValueError(
                f'`method="exact"` is for networks of up to {_MOST_UNITS} '
                f"activations. Received: {count - size} or more"
            )
    logits = values[program.output].reshape(
        len(values[program.output]), program.num_classes
    )
    logits = np.pad(logits, [(0, 1 + count - len(logits)), (0, 0)])
    return units, logits[1:].T.copy(), logits[0].copy()
