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

    After `tf.config.run_functions_eagerly(True)`, for debugging, arguments are
    still made tensors of the signature's types, as a graph does.

    Args:
        function: what to compile.
        **options: of `tf.function`.
    """
    signature = options.get("input_signature")
    if signature is not None:
        function = functools.partial(_on_tensors, function, signature)
    return tf.function(functools.partial(function), autograph=False, **options)


def _on_tensors(function, signature, *args):
    """`function` of the arguments as tensors; they are in a graph already."""
    if tf.executing_eagerly():
        args = tf.nest.map_structure(
            lambda spec, value: tf.convert_to_tensor(value, spec.dtype),
            tuple(signature),
            args,
        )
    return function(*args)


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
