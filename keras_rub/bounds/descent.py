"""Searches for the lines that give one margin its lowest bound.

Any line below an activation gives a sound bound, so the lines may follow the
projected gradient of the margin wherever it leads. Steps are relative to the
largest entry of each layer's gradient, and shrink to 0.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_rub.bounds.program import Convex, Program

_MOMENTUM = 0.7

Parameters = Mapping[int, tf.Tensor]


class MarginSearch(abc.ABC):
    """Lowers one margin a sample by moving the lines of its bound."""

    @abc.abstractmethod
    def __call__(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        columns: tf.Tensor,
        enough: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Bounds of one margin a sample, with lines of its own.

        Args:
            x: tensor [batch, *features]. Samples may be repeated.
            labels: int tensor [batch].
            rho: tensor [batch].
            columns: int tensor [batch]. The competitor of each sample whose
                margin is to be lowered.
            enough: tensor [batch], or `None`. Work ends on a margin below
                this. Defaults to `None`, it never does.

        Returns:
            Tensor [batch], never above the margins that it began with.
        """


def convex_operations(program: Program) -> list[Convex]:
    """The operations whose lines below may be moved."""
    return [op for op in program.operations if isinstance(op, Convex)]


def step_size(first: float, step: int, steps: int, dtype: Any) -> tf.Tensor:
    """The size [] of a step, from `first` down to nearly 0."""
    return tf.constant(first * (1.0 - step / steps), dtype)


def moved(
    program: Program,
    parameters: Parameters,
    gradients: Parameters,
    moments: Parameters,
    size: tf.Tensor,
) -> tuple[dict[int, tf.Tensor], dict[int, tf.Tensor]]:
    """The parameters of lines after one step down, and the new moments.

    Args:
        program: the network.
        parameters: tensors [batch, ...] by the output of their operation.
        gradients: the same of the margins.
        moments: the same, as the step before left them.
        size: tensor [].
    """
    found, momenta = {}, {}
    for operation in convex_operations(program):
        index = operation.output
        gradient = gradients[index]
        axes = list(range(1, len(gradient.shape)))
        largest = tf.reduce_max(tf.abs(gradient), axis=axes, keepdims=True)
        moment = _MOMENTUM * moments[index]
        moment += tf.math.divide_no_nan(gradient, largest)
        momenta[index] = moment
        found[index] = operation.activation.clip_parameter(
            parameters[index] - size * moment
        )
    return found, momenta


def zeros_like(parameters: Parameters) -> dict[int, tf.Tensor]:
    """Moments to begin with."""
    return {index: tf.zeros_like(p) for index, p in parameters.items()}


def open_rows(
    lowest: tf.Tensor, enough: tf.Tensor | None, rows: tf.Tensor
) -> tf.Tensor:
    """Which of the rows that are worked on are not low enough yet: [n].

    Args:
        lowest: tensor [rows]. Their margins.
        enough: tensor [batch], or `None`, as of `MarginSearch`.
        rows: int tensor [rows]. Their places in the batch.
    """
    if enough is None:
        return tf.range(tf.shape(rows)[0])
    return tf.where(~(lowest < tf.gather(enough, rows)))[:, 0]


def take(parts: Any, rows: tf.Tensor) -> Any:
    """Some rows of a nest of tensors."""
    return tf.nest.map_structure(lambda part: tf.gather(part, rows), parts)


def like(flags: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Flags [batch] that broadcast to a tensor [batch, ...]."""
    return tf.reshape(flags, [-1] + [1] * (len(tensor.shape) - 1))
