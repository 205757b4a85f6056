"""The private names of Keras that the library needs, in one place.

Keras has no public form of these. They are read here and nowhere else, so that
a release that renames one breaks one function, and the error says which.
"""

from __future__ import annotations

from typing import Any

import keras


def operation_of(tensor: keras.KerasTensor) -> Any:
    """The operation that made a symbolic tensor."""
    return _read(_read(tensor, "_keras_history"), "operation")


def node_of(tensor: keras.KerasTensor) -> Any:
    """The call of that operation, with its arguments and inputs."""
    history = _read(tensor, "_keras_history")
    nodes = _read(_read(history, "operation"), "_inbound_nodes")
    return nodes[_read(history, "node_index")]


def compile_settings(model: keras.Model) -> dict[str, Any]:
    """What the user gave to `model.compile`, the objects themselves.

    The public `get_compile_config` has only the names of functions.
    """
    return dict(_read(_read(model, "_compile_config"), "config"))


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"Keras {keras.__version__} has no "
            f"`{type(owner).__name__}.{name}`, which keras_rub reads. Install "
            "a version of Keras that README.md names as tested."
        ) from None
