"""Defences: Keras models that train another one to be robust."""

from keras_rub.defenses.arub_model import ARUBModel
from keras_rub.defenses.baseline_model import BaselineModel
from keras_rub.defenses.coap_model import COAPModel
from keras_rub.defenses.ibp_model import IBP_BOUNDS, IBPModel
from keras_rub.defenses.pgd_model import FGSMModel, PGDModel
from keras_rub.defenses.rub_model import RUBModel

__all__ = [
    "ARUBModel",
    "BaselineModel",
    "COAPModel",
    "FGSMModel",
    "IBPModel",
    "IBP_BOUNDS",
    "PGDModel",
    "RUBModel",
]
