"""Robust Keras classifiers with certificates."""
