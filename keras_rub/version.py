"""The version of keras_rub, in the one place that setup.py also reads."""

__version__ = "0.1.0"
