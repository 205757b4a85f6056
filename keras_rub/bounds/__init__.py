"""Bounds of what a perturbation can do to a network's margins."""

from keras_rub.bounds import rules  # noqa: F401, registers the layer rules
from keras_rub.bounds.activations import ConvexActivation, register_activation
from keras_rub.bounds.certificate import Certificate, CertificateTable
from keras_rub.bounds.certification import certified_radius, certify
from keras_rub.bounds.lines import BoundedActivation
from keras_rub.bounds.lowering import (
    UnsupportedLayerError,
    lower,
    register_rule,
)
from keras_rub.bounds.program import affine
from keras_rub.bounds.vertex_expansion import VertexExpansion

__all__ = [
    "BoundedActivation",
    "Certificate",
    "CertificateTable",
    "ConvexActivation",
    "UnsupportedLayerError",
    "VertexExpansion",
    "affine",
    "certified_radius",
    "certify",
    "lower",
    "register_activation",
    "register_rule",
]
