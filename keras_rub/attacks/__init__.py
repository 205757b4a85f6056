"""Attacks: points of a perturbation set that a model gets wrong."""

from keras_rub.attacks.adaptive_pgd import AdaptivePGD
from keras_rub.attacks.ascent import ascend
from keras_rub.attacks.attack import Attack
from keras_rub.attacks.foolbox_attack import FoolboxAttack
from keras_rub.attacks.pgd import PGD
from keras_rub.attacks.projections import project
from keras_rub.attacks.suite import NAMES, PAPER, STRONG, Suite, make
from keras_rub.attacks.switch_attack import SwitchAttack

__all__ = [
    "NAMES",
    "PAPER",
    "PGD",
    "STRONG",
    "AdaptivePGD",
    "Attack",
    "FoolboxAttack",
    "Suite",
    "SwitchAttack",
    "ascend",
    "make",
    "project",
]
