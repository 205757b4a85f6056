"""A server for laptops and tests that speaks as TensorFlow Serving does.

It answers from the same SavedModels by the same protocols, with the words and
codes of TensorFlow Serving where something is wrong. It is for development: it
runs Python, puts no requests together and was not made for hostile clients.
Production is `tensorflow/serving`.
"""

from keras_rub.serving.development.server import DevelopmentServer

__all__ = ["DevelopmentServer"]
