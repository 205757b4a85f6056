"""Data sets by name: embedded, tensorflow-datasets, a folder, a file."""

from keras_rub.datasets.dataset import NORMALIZATIONS, Dataset
from keras_rub.datasets.loading import load, names
from keras_rub.datasets.schema import Column, Schema, TableOptions
from keras_rub.datasets.sources import ENVIRONMENT_VARIABLE, UCI

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "NORMALIZATIONS",
    "UCI",
    "Column",
    "Dataset",
    "Schema",
    "TableOptions",
    "load",
    "names",
]
