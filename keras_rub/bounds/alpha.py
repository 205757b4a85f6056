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

from keras_rub.bounds import descent, screening
from keras_rub.bounds.radii import zero_of
from keras_rub.bounds.vertices import VertexBound, WorstCase
from keras_rub.tracing import compiled_once

# Rounds of: descend on the working set, then add the vertices that became
# the worst.
_ROUNDS = 3
_STEPS = 15
_WORKING_SET = 24
_STEP_SIZE = 0.2

# For a guess: vertices that are added in a round without a look at all of
# them, and how close the radius is to where its lines end.
_ADDED = 8
_ACCURACY = 1e-3


class LineOptimiser(descent.MarginSearch):
    """Moves the lines of RUB's majorant.

    Args:
        make_bound: function `(x, labels, rho, choices, drawn)` to a
            `VertexBound`, as `Problem.vertex_bound`.
    """

    def __init__(self, make_bound: Callable[..., VertexBound]):
        self._make_bound = make_bound
        # Each is traced once; the loops around them run in Python.
        self._begin = compiled_once(self._begin_traced)
        self._step = compiled_once(self._step_traced)
        self._scan = compiled_once(self._scan_traced)
        self._reach = compiled_once(self._reach_traced)

    def __call__(self, x, labels, rho, columns, enough=None):
        data = (x, labels, rho, columns)
        choices, working = self._begin(*data)
        best, worst = self._scan(*data, choices)
        result, rows = best, tf.range(tf.shape(labels)[0])
        for _ in range(_ROUNDS):
            going = descent.open_rows(best, enough, rows)
            if not len(going):
                break
            data, choices, working, worst, best, rows = descent.take(
                (data, choices, working, worst, best, rows), going
            )
            working = tf.concat([working, worst], axis=1)
            choices = self._descend(data, choices, working)
            found, worst = self._scan(*data, choices)
            best = tf.where(found < best, found, best)
            result = tf.tensor_scatter_nd_update(result, rows[:, None], best)
        return result

    def guess_radius(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        columns: tf.Tensor,
        largest: tf.Tensor,
    ) -> tf.Tensor:
        """About the largest radii at which the margins can be proved.

        Lines are optimised at one radius, which is then moved to where these
        lines end, and so on. Not all vertices are looked at, so that the
        result proves nothing.

        Args:
            x: tensor [batch, *features].
            labels: int tensor [batch].
            rho: tensor [batch]. Radii that are about right.
            columns: int tensor [batch]. As in a call.
            largest: tensor [batch]. Larger results are given as this.
        """
        choices, working = self._begin(x, labels, rho, columns)
        for _ in range(_ROUNDS):
            data = (x, labels, rho, columns)
            choices = self._descend(data, choices, working)
            rho, working = self._reach(*data, choices, working, largest)
        return rho

    def _descend(self, data, choices, working):
        state = {
            "choices": choices,
            "moments": descent.zeros_like(choices),
            "kept": choices,
            "lowest": tf.fill(tf.shape(data[1]), data[0].dtype.max),
        }
        for step in range(_STEPS):
            size = descent.step_size(_STEP_SIZE, step, _STEPS, data[0].dtype)
            state = self._step(*data, working, state, size)
        return state["kept"]

    def _begin_traced(self, x, labels, rho, columns):
        bound = self._make_bound(x, labels, rho, None)
        count = min(_WORKING_SET, bound.num_vertices)
        choices = {
            operation.output: bound.relaxation.choices[operation.output]
            for operation in descent.convex_operations(bound.relaxation.program)
        }
        return choices, screening.screen(bound, count)

    def _bound_of(self, x, labels, rho, columns, choices):
        """The bound of the one margin that counts."""
        return self._make_bound(x, labels, rho, choices, drawn=columns[:, None])

    def _scan_traced(self, x, labels, rho, columns, choices):
        worst = self._bound_of(x, labels, rho, columns, choices).worst_case()
        return worst.margins[:, 0], worst.vertices[:, 0]

    def _reach_traced(self, x, labels, rho, columns, choices, working, largest):
        bound = self._bound_of(x, labels, rho, columns, choices)
        more = screening.screen(bound, min(_ADDED, bound.num_vertices))
        working = tf.concat([working, more], axis=1)

        def score(radius):
            bound = self._bound_of(x, labels, radius, columns, choices)
            return bound.worst_case(working).margins[:, 0]

        clean = bound.relaxation.clean_margins[:, 0]
        accuracy = tf.constant(_ACCURACY, rho.dtype)
        return zero_of(score, rho, clean, accuracy, largest), working

    def _step_traced(self, x, labels, rho, columns, working, state, size):
        choices = state["choices"]
        with tf.GradientTape() as tape:
            tape.watch(choices)
            bound = self._bound_of(x, labels, rho, columns, choices)
            worst = bound.worst_case(working)
            fixed = WorstCase(*(tf.stop_gradient(part) for part in worst))
            value = bound.at_worst_case(fixed)[:, 0]
        gradients = tape.gradient(value, choices, unconnected_gradients="zero")
        better = value < state["lowest"]
        new: dict[str, Any] = {
            "lowest": tf.where(better, value, state["lowest"]),
            "kept": {
                index: tf.where(
                    descent.like(better, choice), choice, state["kept"][index]
                )
                for index, choice in choices.items()
            },
        }
        new["choices"], new["moments"] = descent.moved(
            bound.relaxation.program,
            choices,
            gradients,
            state["moments"],
            size,
        )
        return new
