"""Searching hyper-parameters, on one machine or many."""

from keras_rub.tuning.results import Results
from keras_rub.tuning.space import SearchSpace
from keras_rub.tuning.sweep import Sweep

__all__ = ["Results", "SearchSpace", "Sweep"]
