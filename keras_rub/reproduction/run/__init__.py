"""Jobs that train, attack and certify; their results are kept as JSON."""

from keras_rub.reproduction.run import (
    images,
    losses,
    networks,
    protocol,
    speed,
    tables,
    trials,
)

__all__ = [
    "images",
    "losses",
    "networks",
    "protocol",
    "speed",
    "tables",
    "trials",
]
