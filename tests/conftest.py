"""Fixtures that all tests share."""

import dataclasses
import gc
import os

# Two processes share two cores, and all networks are small: more threads only
# wait for each other. Set before TensorFlow starts.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_rub import datasets

# Graphs are many small objects that live long: looking through them again and
# again took a tenth of the time.
gc.set_threshold(100_000, 50, 50)

# Most of the time goes into tracing a new combination of settings, not into
# one more example of it: the slow suite tries many.
for name, examples in (("fast", 10), ("thorough", 100)):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
hypothesis.settings.load_profile("fast")


def pytest_addoption(parser):
    parser.addoption(
        "--fast",
        action="store_true",
        help="One case of each test, without the tests marked slow or medium.",
    )
    parser.addoption(
        "--traced",
        action="store_true",
        help="Trace the functions of tests marked eager too, as users do.",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--fast"):
        return
    chosen, others, seen = [], [], set()
    for item in items:
        function = (item.path, item.originalname)
        long = any(item.get_closest_marker(m) for m in ("medium", "slow"))
        if long or function in seen:
            others.append(item)
        else:
            seen.add(function)
            chosen.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


@pytest.fixture(autouse=True)
def seed():
    """Makes every test repeat itself."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def eager(request):
    """Runs a test marked `eager` without tracing.

    To trace a bound takes many times as long as to run it once on a small
    network, so tests of many networks that ask each only once or twice are
    marked. With `--traced` they are traced all the same.
    """
    marked = request.node.get_closest_marker("eager") is not None
    traced = request.config.getoption("--traced")
    tf.config.run_functions_eagerly(marked and not traced)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def rng():
    """A numpy generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def few_samples(monkeypatch):
    """Lets `datasets.load` give few samples, where figures don't matter."""
    real = datasets.load

    def load(*args, **kwargs):
        data = real(*args, **kwargs)
        parts = {"train": 96, "validation": 12, "test": 12}
        return dataclasses.replace(
            data,
            **{
                name: tuple(array[:count] for array in getattr(data, name))
                for name, count in parts.items()
            },
        )

    monkeypatch.setattr(datasets, "load", load)
