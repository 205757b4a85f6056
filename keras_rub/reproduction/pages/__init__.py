"""Result pages: Markdown, CSV and PNG, made of rows and plans alone."""

from keras_rub.reproduction.pages import (
    attacked,
    certified,
    large_radii,
    losses,
    noise,
    ranks,
    search,
    speed,
    summary,
    trials,
)

__all__ = [
    "attacked",
    "certified",
    "large_radii",
    "losses",
    "noise",
    "ranks",
    "search",
    "speed",
    "summary",
    "trials",
]
