"""Rows of the CSV files: what the jobs found, beside the paper's figures."""

from keras_rub.reproduction.rows import (
    images,
    losses,
    protocol,
    summary,
    tables,
    trials,
)

__all__ = ["images", "losses", "protocol", "summary", "tables", "trials"]
