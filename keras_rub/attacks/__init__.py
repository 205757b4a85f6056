"""Attacks: points of a perturbation set that a model gets wrong."""

from keras_rub.attacks.pgd import ascend
from keras_rub.attacks.projections import project

__all__ = ["ascend", "project"]
