"""A network of affine maps and activations of two rays, in numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from keras_rub.bounds.problem import Problem
from keras_rub.bounds.program import Affine, Convex

# More units than this make a program that no solver gets through.
_MOST_UNITS = 4096

# Steps of a climb, and points of a line that are looked at.
_STEPS = 20
_SHARES = np.linspace(0.0, 1.0, 9)[1:]

# Points that a climb is begun at, besides the starts themselves, and points
# that are looked at to find them.
_BEGINNINGS = 8
_LOOKED_AT = 8192


@dataclasses.dataclass(frozen=True)
class Unit:
    """Activations whose inputs are affine in what comes before.

    `rows` [w, n] and `heights` [w] say how; n counts the inputs and all
    earlier units. `source` is the value that they read.
    """

    rows: np.ndarray
    heights: np.ndarray
    rays: tuple[float, float]
    source: int


@dataclasses.dataclass(frozen=True)
class Room:
    """How far the features of one sample move: arrays [M], and the norm."""

    reach: np.ndarray
    up: np.ndarray
    down: np.ndarray
    norm: int | str

    def farthest(self, slopes: np.ndarray, radii: np.ndarray) -> np.ndarray:
        """The moves [n, M] within radii [n] that rise most along slopes."""
        free = self.reach > 0
        reach = np.where(free, self.reach, 1.0)
        # What it costs to move a feature as far as it goes.
        most = np.where(slopes > 0, self.up, self.down) / reach
        most = np.where(free & (slopes != 0), most, 0.0)
        if self.norm == "inf":
            spent = np.minimum(most, radii[:, None])
        else:
            order = np.argsort(-np.abs(slopes) * reach, axis=1)
            most = np.take_along_axis(most, order, axis=1)
            most = np.minimum(most, radii[:, None])
            before = np.cumsum(most, axis=1) - most
            left = np.maximum(radii[:, None] - before, 0.0)
            spent = np.zeros_like(slopes)
            np.put_along_axis(spent, order, np.minimum(most, left), axis=1)
        return spent * np.sign(slopes) * reach

    def single(self, radius: float) -> np.ndarray:
        """Moves [n, M] of one feature each."""
        free = np.flatnonzero(self.reach)
        most = radius * self.reach[free]
        moves = np.zeros([2, len(free), self.reach.size])
        moves[0, range(len(free)), free] = np.minimum(most, self.up[free])
        moves[1, range(len(free)), free] = -np.minimum(most, self.down[free])
        return moves.reshape(-1, self.reach.size)


class Piecewise:
    """A network as its units, and its logits as functions of all before.

    Args:
        problem: a network of affine maps and activations of two rays.
    """

    def __init__(self, problem: Problem):
        self.units, self.rows, self.heights = _read(problem)

    def margin(self, label: int, rival: int) -> tuple[np.ndarray, float]:
        """`z_rival - z_label` as a function of inputs and units."""
        return (
            self.rows[rival] - self.rows[label],
            float(self.heights[rival] - self.heights[label]),
        )

    def values(self, points: np.ndarray) -> np.ndarray:
        """Inputs and units [..., n] at points [..., M]."""
        found = points
        for unit in self.units:
            z = found @ unit.rows.T + unit.heights
            left, right = unit.rays
            new = np.maximum(left * z, right * z)
            found = np.concatenate([found, new], axis=-1)
        return found

    def slopes(self, values: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The gradient [n, M] of `row` times the values [n, ...]."""
        found = np.repeat(row[None], len(values), axis=0)
        for unit in reversed(self.units):
            before = unit.rows.shape[1]
            after = before + len(unit.heights)
            left, right = unit.rays
            # A unit has the sign of its input.
            bend = np.where(values[:, before:after] > 0, right, left)
            found[:, :before] += (found[:, before:after] * bend) @ unit.rows
        return found[:, : self.units[0].rows.shape[1] if self.units else None]

    def climb(
        self,
        row: np.ndarray,
        starts: np.ndarray,
        radii: np.ndarray,
        room: Room,
    ) -> np.ndarray:
        """A point [M] at which `row` times the values is large.

        Frank and Wolfe's way: go towards the point that the gradient asks for,
        as far as it helps.

        Args:
            row: array, of inputs and units.
            starts: array [n, M].
            radii: array [n]. How far the features of each start move.
            room: what limits their moves.
        """
        points, owners = self._beginnings(row, starts, radii, room)
        starts, radii = starts[owners], radii[owners]
        everyone = np.arange(len(points))
        for _ in range(_STEPS):
            values = self.values(points)
            slopes = self.slopes(values, row)
            ends = starts + room.farthest(slopes, radii)
            way = (ends - points)[:, None]
            tried = points[:, None] + _SHARES[:, None] * way
            reached = self.values(tried) @ row
            best = reached.argmax(axis=1)
            better = reached[everyone, best] > values @ row + 1e-9
            if not better.any():
                break
            points = np.where(better[:, None], tried[everyone, best], points)
        return points[(self.values(points) @ row).argmax()]

    def _beginnings(self, row, starts, radii, room):
        """The starts and the best single moves, and whose they are."""
        points, owners = starts, np.arange(len(starts))
        count = 2 * int(np.count_nonzero(room.reach))
        chosen = owners[: _LOOKED_AT // max(count, 1)]
        if count and len(chosen):
            single = np.concatenate(
                [starts[i] + room.single(radii[i]) for i in chosen]
            )
            best = np.argsort(-(self.values(single) @ row))[:_BEGINNINGS]
            points = np.concatenate([points, single[best]])
            owners = np.concatenate([owners, best // count])
        return points, owners


def _read(problem: Problem) -> tuple[list[Unit], np.ndarray, np.ndarray]:
    """The units of a network, and its logits as functions of all before."""
    program = problem.program
    size = int(np.prod(program.input_shape))
    # Each value as [1 + n, ...]: a constant, then its slopes by n variables.
    values: dict[int, np.ndarray] = {
        0: np.concatenate([np.zeros([1, size]), np.eye(size)]).reshape(
            -1, *program.input_shape
        )
    }
    units: list[Unit] = []
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
            Unit(
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
