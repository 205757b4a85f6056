"""Robust Keras classifiers, with certificates.

model = keras_rub.RUBModel(base)      # the user's own Keras model
model.fit(x, y)
"""

from keras_rub import callbacks
from keras_rub.bounds import (
    UnsupportedLayerError,
    VertexExpansion,
    register_rule,
)
from keras_rub.defenses import ARUBModel, RUBModel
from keras_rub.uncertainty import PerturbationSet
from keras_rub.version import __version__

__all__ = [
    "ARUBModel",
    "PerturbationSet",
    "RUBModel",
    "UnsupportedLayerError",
    "VertexExpansion",
    "__version__",
    "callbacks",
    "register_rule",
]
