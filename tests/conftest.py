"""Fixtures that all tests share."""

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def seed():
    """Makes every test repeat itself."""
    keras.utils.set_random_seed(0)


@pytest.fixture
def rng():
    """A numpy generator with a fixed seed."""
    return np.random.default_rng(0)
