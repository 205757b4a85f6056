"""Bounds of what a perturbation can do to a network's margins."""

from keras_rub.bounds import rules  # noqa: F401, registers the layer rules
from keras_rub.bounds.program import (
    UnsupportedLayerError,
    lower,
    register_rule,
)
from keras_rub.bounds.vertex_expansion import VertexExpansion

__all__ = [
    "UnsupportedLayerError",
    "VertexExpansion",
    "lower",
    "register_rule",
]
