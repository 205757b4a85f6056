"""Defences: Keras models that train another one to be robust."""

from keras_rub.defenses.arub_model import ARUBModel
from keras_rub.defenses.rub_model import RUBModel

__all__ = ["ARUBModel", "RUBModel"]
