"""Functions that are compiled once for each network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """As `tf.function`, for a function that belongs to one network.

    TensorFlow counts tracings by the code of a function, which all networks
    share, and would warn of a handful of networks as of needless retracing.
    A partial has no code of its own, so each network is counted by itself.

    AutoGraph is off, as in Keras's own training steps: loops and conditions
    are written as TensorFlow operations, and to rewrite the source of all that
    is called took most of the time of a first call.

    Args:
        function: what to compile.
        **options: of `tf.function`.
    """
    return tf.function(functools.partial(function), autograph=False, **options)


def compiled_once(function: Callable[..., Any]) -> Callable:
    """As `compiled`, but traced once, at the first call, for all later ones.

    `reduce_retracing` takes up to three tracings to learn the same.

    Args:
        function: of tensors, or nests of them. The length of their first
            axis, and of the second of whole numbers, may differ by call.
    """

    def spec(tensor):
        free = min(2 if tensor.dtype.is_integer else 1, tensor.shape.rank)
        shape = [None] * free + list(tensor.shape[free:])
        return tf.TensorSpec(shape, tensor.dtype)

    traced: list[Callable] = []

    def call(*args):
        if not traced:
            signature = tf.nest.map_structure(spec, args)
            traced.append(compiled(function, input_signature=signature))
        return traced[0](*args)

    return call
