"""Result pages: Markdown, CSV and PNG, made of rows and plans alone."""

from keras_rub.reproduction.pages import (
    attacked,
    certified,
    losses,
    ranks,
    speed,
    summary,
)

__all__ = ["attacked", "certified", "losses", "ranks", "speed", "summary"]
