"""alpha-CROWN: the lines below the activations, optimised for each margin.

CROWN's lower line of a ReLU that may be on or off has slope 0 or 1. Any slope
between them is as sound, and which is best depends on the margin. Here the
slopes follow the projected gradient of one margin; the ranges stay those of
CROWN. Every step is a bound by itself, so the lowest one is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from keras_rub.bounds import descent
from keras_rub.bounds.linear import LinearRelaxation
from keras_rub.bounds.lines import Lines
from keras_rub.tracing import compiled_once

if TYPE_CHECKING:
    from keras_rub.bounds.problem import Problem

_STEPS = 20
_STEP_SIZE = 0.3

# Steps between two looks at which margins are low enough.
_LOOK = 5


class SlopeOptimiser(descent.MarginSearch):
    """Moves the slopes of CROWN's lower lines.

    Args:
        problem: the network and the attacker.
    """

    def __init__(self, problem: Problem):
        self._problem = problem
        self._operations = descent.convex_operations(problem.program)
        # Each is traced once; the loops around them run in Python.
        self._relax = compiled_once(self._relax_traced)
        self._start = compiled_once(self._start_traced)
        self._step = compiled_once(self._step_traced)

    def __call__(self, x, labels, rho, columns, enough=None):
        first, copies = _distinct(x, rho)
        found = self._relax(tf.gather(x, first), tf.gather(rho, first))
        lines, crown, open_ = descent.take(found, copies)
        data = (x, labels, rho, columns, lines, open_)
        state = self._start(*data, crown)
        result, rows = state["lowest"], tf.range(tf.shape(labels)[0])
        for step in range(_STEPS):
            if step % _LOOK == 0:
                going = descent.open_rows(state["lowest"], enough, rows)
                if not len(going):
                    break
                data, state, rows = descent.take((data, state, rows), going)
            size = descent.step_size(_STEP_SIZE, step, _STEPS, x.dtype)
            state = self._step(*data, state, size)
            result = tf.tensor_scatter_nd_update(
                result, rows[:, None], state["lowest"]
            )
        return result

    def _relax_traced(self, x, rho):
        """CROWN's lines, their parameters, and which of them may move."""
        relaxation = self._problem.linear(x, rho, "crown")
        crown, open_ = {}, {}
        for operation in self._operations:
            index = operation.output
            low, high = relaxation.intervals[operation.inputs[0]]
            if operation.activation.rays is None:
                crown[index] = 0.5 * (low + high)
                open_[index] = high > low
            else:
                crown[index] = relaxation.lines[index].lower_slope
                # On one side of 0 any other line can only be worse.
                open_[index] = (low < 0) & (high > 0)
        return relaxation.lines, crown, open_

    def _start_traced(self, x, labels, rho, columns, lines, open_, crown):
        """The better one of CROWN's slopes and those of parallel lines."""
        parallel = dict(crown)
        for operation in self._operations:
            index, activation = operation.output, operation.activation
            if activation.rays is not None:
                slope = activation.clip_parameter(lines[index].upper_slope)
                parallel[index] = tf.where(open_[index], slope, crown[index])
        lowest = self._value(x, labels, rho, columns, lines)
        other = self._value(
            x, labels, rho, columns, self._with(lines, parallel)
        )
        better = other < lowest
        return {
            "parameters": {
                index: tf.where(
                    descent.like(better, crown[index]),
                    parallel[index],
                    crown[index],
                )
                for index in crown
            },
            "moments": descent.zeros_like(crown),
            "lowest": tf.where(better, other, lowest),
        }

    def _step_traced(self, x, labels, rho, columns, lines, open_, state, size):
        parameters = state["parameters"]
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            value = self._value(
                x, labels, rho, columns, self._with(lines, parameters)
            )
        gradients = tape.gradient(
            value, parameters, unconnected_gradients="zero"
        )
        gradients = {
            index: tf.where(open_[index], gradient, 0.0)
            for index, gradient in gradients.items()
        }
        found, moments = descent.moved(
            self._problem.program, parameters, gradients, state["moments"], size
        )
        for index, parameter in parameters.items():
            found[index] = tf.where(open_[index], found[index], parameter)
        # NaN is no bound: the comparison is false.
        lowest = state["lowest"]
        return {
            "parameters": found,
            "moments": moments,
            "lowest": tf.where(value < lowest, value, lowest),
        }

    def _with(self, lines, parameters):
        """The same lines, with others below the activations."""
        found = dict(lines)
        for operation in self._operations:
            index = operation.output
            slope, height = operation.activation.line(parameters[index])
            if height is None:
                height = tf.zeros_like(slope)
            upper = lines[index]
            found[index] = Lines(
                upper.upper_slope, upper.upper_height, slope, height
            )
        return found

    def _value(self, x, labels, rho, columns, lines):
        """The bound [batch] of the one margin that counts."""
        relaxation = LinearRelaxation.of_lines(
            self._problem.program,
            x,
            rho,
            self._problem.perturbations,
            lines,
            self._problem.shapes,
        )
        competitors = self._problem.competitors(labels, columns[:, None])
        return relaxation.margins(competitors)[:, 0]


def _distinct(x: tf.Tensor, rho: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The first of equal samples, and for each sample which one that is."""
    flat = tf.concat([tf.reshape(x, [len(x), -1]), rho[:, None]], axis=1)
    _, copies = tf.raw_ops.UniqueV2(x=flat, axis=[0])
    count = tf.reduce_max(copies) + 1
    first = tf.math.unsorted_segment_min(tf.range(len(x)), copies, count)
    return first, copies
