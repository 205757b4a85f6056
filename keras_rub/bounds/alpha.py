"""alpha-RUB: the lines below the activations, optimised for each margin.

Any line below an activation gives a sound bound. The paper takes the one that
touches at the clean input; here the lines follow the projected gradient of the
worst margin, taken over a small working set of vertices. The bound that
results is then evaluated at every vertex, so it holds whatever the
optimisation did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_rub.bounds import screening
from keras_rub.bounds.program import Convex
from keras_rub.bounds.vertices import VertexBound, WorstCase
from keras_rub.tracing import compiled_once

# Rounds of: descend on the working set, then add the vertices that became
# the worst.
_ROUNDS = 3
_STEPS = 15
_WORKING_SET = 24
_STEP_SIZE = 0.2
_MOMENTUM = 0.7


class LineOptimiser:
    """Lowers one margin a sample by moving the lines of its bound.

    Args:
        make_bound: function `(x, labels, rho, choices)` to a `VertexBound`.
    """

    def __init__(self, make_bound: Callable[..., VertexBound]):
        self._make_bound = make_bound
        # Each is traced once; the loops around them run in Python.
        self._begin = compiled_once(self._begin_traced)
        self._step = compiled_once(self._step_traced)
        self._scan = compiled_once(self._scan_traced)

    def __call__(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        columns: tf.Tensor,
    ) -> tf.Tensor:
        """Bounds of one margin a sample, with lines of its own.

        Args:
            x: tensor [batch, *features].
            labels: int tensor [batch].
            rho: tensor [batch].
            columns: int tensor [batch]. The competitor of each sample whose
                margin is to be lowered.

        Returns:
            Tensor [batch].
        """
        data = (x, labels, rho, columns)
        choices, working = self._begin(*data)
        best, worst = self._scan(*data, choices)
        for _ in range(_ROUNDS):
            working = tf.concat([working, worst], axis=1)
            choices = self._descend(data, choices, working)
            found, worst = self._scan(*data, choices)
            best = tf.where(found < best, found, best)
        return best

    def _descend(self, data, choices, working):
        state = {
            "choices": choices,
            "moments": {i: tf.zeros_like(c) for i, c in choices.items()},
            "kept": choices,
            "lowest": tf.fill(tf.shape(data[1]), data[0].dtype.max),
        }
        for step in range(_STEPS):
            size = tf.constant(
                _STEP_SIZE * (1.0 - step / _STEPS), data[0].dtype
            )
            state = self._step(*data, working, state, size)
        return state["kept"]

    def _begin_traced(self, x, labels, rho, columns):
        bound = self._make_bound(x, labels, rho, None)
        count = min(_WORKING_SET, bound.num_vertices)
        choices = {
            operation.output: bound.relaxation.choices[operation.output]
            for operation in bound.relaxation.program.operations
            if isinstance(operation, Convex)
        }
        return choices, screening.screen(bound, count)

    def _scan_traced(self, x, labels, rho, columns, choices):
        bound = self._make_bound(x, labels, rho, choices)
        worst = bound.worst_case()
        vertices = tf.gather(worst.vertices, columns[:, None], batch_dims=1)
        return _column(worst.margins, columns), vertices[:, 0]

    def _step_traced(self, x, labels, rho, columns, working, state, size):
        choices = state["choices"]
        with tf.GradientTape() as tape:
            tape.watch(choices)
            bound = self._make_bound(x, labels, rho, choices)
            worst = bound.worst_case(working)
            fixed = WorstCase(*(tf.stop_gradient(part) for part in worst))
            value = _column(bound.at_worst_case(fixed), columns)
        gradients = tape.gradient(value, choices, unconnected_gradients="zero")
        better = value < state["lowest"]
        new: dict[str, Any] = {"choices": {}, "moments": {}, "kept": {}}
        activations = {
            operation.output: operation.activation
            for operation in bound.relaxation.program.operations
            if isinstance(operation, Convex)
        }
        for index, choice in choices.items():
            shape = [-1] + [1] * (len(choice.shape) - 1)
            new["kept"][index] = tf.where(
                tf.reshape(better, shape), choice, state["kept"][index]
            )
            gradient = gradients[index]
            axes = list(range(1, len(choice.shape)))
            largest = tf.reduce_max(tf.abs(gradient), axis=axes, keepdims=True)
            moment = _MOMENTUM * state["moments"][index]
            moment += tf.math.divide_no_nan(gradient, largest)
            new["moments"][index] = moment
            new["choices"][index] = activations[index].clip_parameter(
                choice - size * moment
            )
        new["lowest"] = tf.where(better, value, state["lowest"])
        return new


def _column(margins: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    return tf.gather(margins, columns[:, None], batch_dims=1)[:, 0]
