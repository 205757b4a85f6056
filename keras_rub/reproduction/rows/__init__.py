"""Rows of the CSV files: what the jobs found, beside the paper's figures."""

from keras_rub.reproduction.rows import images, losses, summary, tables

__all__ = ["images", "losses", "summary", "tables"]
