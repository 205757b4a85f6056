"""Robust Keras classifiers, with certificates.

model = keras_rub.RUBModel(base)      # the user's own Keras model
model.fit(x, y)
"""

from keras_rub import callbacks, datasets, metrics, models
from keras_rub.bounds import (
    Certificate,
    CertificateTable,
    UnsupportedLayerError,
    VertexExpansion,
    certified_radius,
    certify,
    register_rule,
)
from keras_rub.defenses import ARUBModel, RUBModel
from keras_rub.uncertainty import PerturbationSet
from keras_rub.version import __version__

__all__ = [
    "ARUBModel",
    "Certificate",
    "CertificateTable",
    "PerturbationSet",
    "RUBModel",
    "UnsupportedLayerError",
    "VertexExpansion",
    "__version__",
    "callbacks",
    "certified_radius",
    "certify",
    "datasets",
    "metrics",
    "models",
    "register_rule",
]
