"""Clean, attacked and certified accuracy of a model, side by side."""

from keras_rub.evaluation.flips import Change, Flips, flips
from keras_rub.evaluation.report import html_report
from keras_rub.evaluation.result import Evaluation
from keras_rub.evaluation.runner import evaluate

__all__ = [
    "Change",
    "Evaluation",
    "Flips",
    "evaluate",
    "flips",
    "html_report",
]
