"""Robust Keras classifiers, with certificates.

model = keras_rub.RUBModel(base)      # the user's own Keras model
model.fit(x, y)
"""

from keras_rub import attacks, callbacks, datasets, metrics, models, serving
from keras_rub.bounds import (
    BoundedActivation,
    Certificate,
    CertificateTable,
    ConvexActivation,
    UnsupportedLayerError,
    VertexExpansion,
    affine,
    certified_radius,
    certify,
    register_activation,
    register_rule,
)
from keras_rub.categories import Category, Ordinal
from keras_rub.defenses import (
    ARUBModel,
    BaselineModel,
    COAPModel,
    FGSMModel,
    IBPModel,
    PGDModel,
    RUBModel,
)
from keras_rub.evaluation import Change, Evaluation, Flips, evaluate, flips
from keras_rub.initializers import IBPInitializer
from keras_rub.perturbations import PerturbationSet, paper_radius
from keras_rub.serving import export
from keras_rub.version import __version__

__all__ = [
    "ARUBModel",
    "BaselineModel",
    "BoundedActivation",
    "COAPModel",
    "Category",
    "Certificate",
    "CertificateTable",
    "Change",
    "ConvexActivation",
    "Evaluation",
    "FGSMModel",
    "Flips",
    "IBPInitializer",
    "IBPModel",
    "Ordinal",
    "PGDModel",
    "PerturbationSet",
    "RUBModel",
    "UnsupportedLayerError",
    "VertexExpansion",
    "__version__",
    "affine",
    "attacks",
    "callbacks",
    "certified_radius",
    "certify",
    "datasets",
    "evaluate",
    "export",
    "flips",
    "metrics",
    "models",
    "paper_radius",
    "register_activation",
    "register_rule",
    "serving",
]
