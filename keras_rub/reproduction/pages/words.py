"""Numbers of plans and recipes in words, and cells of tables."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from keras_rub.reproduction.plans import ImagePlan
from keras_rub.training import ARCHITECTURES, Recipe


def cell(percent: float | None, bold: bool = False) -> str:
    """A percent for a table; a dash where there is none."""
    if percent is None:
        return "-"
    return f"**{percent:.2f}**" if bold else f"{percent:.2f}"


def numbers(values: Iterable[float]) -> str:
    """Numbers with commas between."""
    return ", ".join(f"{value:g}" for value in values)


def power(value: float) -> str:
    """A small number as a multiple of a power of ten, such as 3e-3."""
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def rounds(recipe: Recipe) -> str:
    """Steps and samples a step, such as 2000 of 128."""
    return f"{recipe.steps} of {recipe.batch_size}"


def ramp(recipe: Recipe) -> str:
    """The part of the training over which the radius grows."""
    if recipe.rho_ramp == 0.5:
        return "the first half"
    return f"the first {100 * recipe.rho_ramp:g} %"


def ramped(recipe: Recipe) -> str:
    """A sentence on how the radius grows."""
    return f"The radius is ramped up over {ramp(recipe)} of the training."


def augmented(recipe: Recipe, which: str = "Training images") -> list[str]:
    """A sentence on what is done to training images, if anything.

    Args:
        recipe: `Recipe`.
        which: the subject of the sentence.
    """
    found = []
    if recipe.shift:
        pixels = "a pixel" if recipe.shift == 1 else f"{recipe.shift} pixels"
        found.append(f"moved by up to {pixels}")
    if recipe.flip:
        found.append("mirrored")
    if not found:
        return []
    return [
        f"{which} are {' and '.join(found)} at random; the paper's are not."
    ]


def augmented_rub(plan: ImagePlan) -> list[str]:
    """The same of RUB's perceptrons, whose small radii may differ."""
    images = "Training images of RUB networks"
    if augmented(plan.rub) == augmented(plan.rub_small):
        return augmented(plan.rub, images)
    return [
        *augmented(plan.rub_small, f"{images} for radii up to {plan.small:g}"),
        *augmented(plan.rub, f"{images} for radii above {plan.small:g}"),
    ]


def optimizer(recipe: Recipe) -> str:
    """The optimiser and its learning rate."""
    return f"Adam from {power(recipe.learning_rate)} with cosine decay"


def network(recipe: Recipe) -> str:
    """The hidden layers of a perceptron, such as 3x200."""
    base = ARCHITECTURES[recipe.architecture]((1,), 2)
    dense = [x for x in base.layers if isinstance(x, keras.layers.Dense)]
    widths = [layer.units for layer in dense[:-1]]
    if len(set(widths)) == 1:
        return f"{len(widths)}x{widths[0]}"
    return "-".join(map(str, widths))
