"""The bounds of one model, compiled once and kept with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_rub import cautions
from keras_rub.bounds import decision
from keras_rub.bounds.methods import Method
from keras_rub.bounds.problem import Problem
from keras_rub.classifier import base_of
from keras_rub.perturbations import PerturbationSet
from keras_rub.tracing import compiled


def compiled_bounds(
    model: keras.Model,
    perturbations: PerturbationSet,
    *,
    dtype: str = "float32",
    memory_budget: int = 2**26,
    widest: int | None = None,
) -> CompiledBounds:
    """The compiled bounds of these settings, made once for each model.

    Args:
        model: a robust model, or any Keras classifier that can be lowered.
        perturbations: the attacker.
        dtype: `"float32"` or `"float64"`. Defaults to `"float32"`.
        memory_budget: int. Bytes that one chunk of vertices or rows may
            take. Defaults to `2**26`.
        widest: int, or `None`; see `Problem`. Defaults to `None`.
    """
    if dtype not in ("float32", "float64"):
        raise ValueError(
            '`dtype` must be "float32" or "float64". '
            f"Received: `dtype={dtype!r}`"
        )
    base = base_of(model)
    key = (perturbations.key, dtype, int(memory_budget), widest)
    # Kept with the model, past Keras's tracking, so that it lives as long.
    known = base.__dict__.setdefault("_keras_rub_bounds", {})
    if key not in known:
        problem = Problem.of(
            base, perturbations, int(memory_budget), widest=widest
        )
        cautions.about_precision(base)
        cautions.about_scale(
            problem.inputs.network, problem.inputs.perturbations
        )
        known[key] = CompiledBounds(problem, dtype)
    return known[key]


class CompiledBounds:
    """Compiled functions of one problem.

    All take x [batch, *features], labels [batch] and rho [batch], and return
    what the functions of the same name of `Problem` and `decision` do.

    Args:
        problem: the network and the attacker.
        dtype: `"float32"` or `"float64"`.
    """

    def __init__(self, problem: Problem, dtype: str):
        self.problem = problem
        self.dtype = tf.as_dtype(dtype)
        self.input_shape = problem.program.input_shape
        self.signature = [
            tf.TensorSpec([None, *self.input_shape], self.dtype),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None], self.dtype),
        ]
        self.logits = compiled(
            problem.logits, input_signature=self.signature[:1]
        )
        self.allowance = compiled(
            problem.allowance, input_signature=self.signature
        )
        self.margins_at = compiled(
            self._margins_at,
            input_signature=[
                *self.signature,
                tf.TensorSpec([None, None], tf.int32),
            ],
        )
        self._searches: dict[str, Any] = {}
        self._solvers: dict[str, Any] = {}
        self._margins: dict[str, Callable[..., tf.Tensor]] = {}
        self._decide: dict[str, Callable[..., decision.Decision]] = {}
        self._radius: dict[str, Callable[..., decision.Radius]] = {}

    def pack(self, x: Any) -> tf.Tensor:
        """The user's inputs as the one tensor that all functions take."""
        return self.problem.inputs.pack(x)

    @property
    def perturbations(self) -> PerturbationSet:
        """The attacker."""
        return self.problem.perturbations

    def margins(self, method: Method) -> Callable[..., tf.Tensor]:
        """The compiled margins [batch, K - 1] of one method."""
        if method.name not in self._margins:
            self._margins[method.name] = compiled(
                functools.partial(method.function, self.problem),
                input_signature=self.signature,
            )
        return self._margins[method.name]

    def search(self, method: Method) -> Any:
        """What lowers the single margins of a method that searches."""
        if method.name not in self._searches:
            assert method.search is not None
            self._searches[method.name] = method.search(self.problem)
        return self._searches[method.name]

    def solver(self, method: Method) -> Any:
        """What decides single samples, of a method that has one."""
        if method.name not in self._solvers:
            assert method.solver is not None
            self._solvers[method.name] = method.solver(self.problem)
        self._solvers[method.name].read()
        return self._solvers[method.name]

    @functools.cached_property
    def without_switches(self) -> CompiledBounds:
        """The same for an attacker who leaves categories as they are."""
        inputs = self.problem.inputs
        free = self.perturbations.numeric(tuple(self.input_shape))
        inputs = dataclasses.replace(inputs, perturbations=free)
        return CompiledBounds(
            dataclasses.replace(self.problem, inputs=inputs), self.dtype.name
        )

    def _margins_at(self, x, labels, rho, vertices):
        bound = self.problem.vertex_bound(x, labels, rho)
        return bound.worst_case(vertices).margins

    def decide(self, method: Method) -> Callable[..., decision.Decision]:
        """The compiled decisions of one method."""
        if method.name not in self._decide:
            self._decide[method.name] = compiled(
                functools.partial(decision.decide, self.problem, method),
                input_signature=self.signature,
            )
        return self._decide[method.name]

    def find_radius(self, method: Method) -> Callable[..., decision.Radius]:
        """The compiled radii of one method.

        It takes x and labels, the tolerance and the largest radius.
        """
        if method.name not in self._radius:
            number = tf.TensorSpec([], tf.float64)
            self._radius[method.name] = compiled(
                functools.partial(decision.find_radius, self.problem, method),
                input_signature=[*self.signature[:2], number, number],
            )
        return self._radius[method.name]

    def check_memory(self, method: Method) -> None:
        """Raises if a single vertex does not fit into the memory budget."""
        norm = self.perturbations.norm
        if not any(stage.uses_vertices for stage in method.stages_for(norm)):
            return
        needed, budget = self.bytes_of_vertex, self.problem.memory_budget
        if needed > budget:
            raise ValueError(
                "`memory_budget` is too small for one vertex of one sample, "
                f"which takes about {needed} bytes. "
                f"Received: `memory_budget={budget}`"
            )

    @functools.cached_property
    def bytes_of_vertex(self) -> int:
        """About what the evaluation of one vertex of one sample takes."""
        bound = self.problem.vertex_bound(*self.blank())
        return bound.row_bytes()

    def blank(self) -> tuple[Any, ...]:
        """One input of zeros, its label and its radius."""
        return (
            tf.zeros([1, *self.input_shape], self.dtype),
            tf.zeros([1], tf.int32),
            tf.zeros([1], self.dtype),
        )
