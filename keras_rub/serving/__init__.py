"""Robust models in TensorFlow Serving, with their certificates."""

from keras_rub.serving.development import DevelopmentServer
from keras_rub.serving.exporting import export
from keras_rub.serving.metadata import read_metadata
from keras_rub.serving.server import write_config

__all__ = ["DevelopmentServer", "export", "read_metadata", "write_config"]
