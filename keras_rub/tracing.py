"""Functions that are compiled once for each network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any], **options: Any) -> Callable:
    """As `tf.function`, for a function that belongs to one network.

    TensorFlow counts tracings by the code of a function, which all networks
    share, and would warn of a handful of networks as of needless retracing.
    A partial has no code of its own, so each network is counted by itself.

    Args:
        function: what to compile.
        **options: of `tf.function`.
    """
    return tf.function(functools.partial(function), **options)
