"""The scripts beside the package, on embedded data."""

import importlib.util
import json
import pathlib
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parent.parent


def load(path):
    """Imports a script as a module, without running it.

    Each script has its own flags, and several share this process: those of
    the one that was asked for last are in force.
    """
    name = f"script_{pathlib.Path(path).stem}"
    for known in _FLAGS.values():
        for flag in known:
            if flag in flags.FLAGS:
                delattr(flags.FLAGS, flag)
    if name in sys.modules and name in _FLAGS:
        for flag, value in _FLAGS[name].items():
            flags.FLAGS[flag] = value
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    _FLAGS[name] = {
        holder.name: flags.FLAGS[holder.name]
        for holder in vars(module).values()
        if isinstance(holder, flags.FlagHolder)
    }
    return module


_FLAGS = {}


def run(path, capsys, **values):
    """Runs a script's main with these flags; returns what it printed."""
    module = load(path)
    holders = {
        holder.name: holder
        for holder in vars(module).values()
        if isinstance(holder, flags.FlagHolder)
    }
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    saved = [(holders[name], value) for name, value in values.items()]
    with flagsaver.flagsaver(*saved):
        module.main([path])
    return capsys.readouterr().out


@pytest.mark.medium
def test_quickstart(tmp_path, capsys):
    printed = run(
        "examples/quickstart.py",
        capsys,
        epochs=4,
        samples=40,
        out=str(tmp_path / "picture.png"),
    )
    for word in ("nominal", "aRUB", "RUB", "attacked", "certified"):
        assert word in printed
    assert (tmp_path / "picture.png").stat().st_size > 20_000


@pytest.mark.medium
def test_benchmark(tmp_path, capsys):
    module = load("tools/benchmark.py")
    # Its plain formula is the one that RUB trains on.
    import keras
    import numpy as np

    import keras_rub

    keras.utils.set_random_seed(0)
    base = keras_rub.models.mlp((6,), 3, hidden=(5, 4, 5))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6)).astype("float32")
    y = np.array([0, 1, 2, 0], "int32")
    plain = module.PlainRUBModel(base, rho=0.7)
    fast = keras_rub.RUBModel(base, rho=0.7, vertices="all")
    np.testing.assert_allclose(
        plain.worst_case_margins(x, y),
        fast.worst_case_margins(x, y),
        rtol=1e-5,
        atol=1e-6,
    )
    path = tmp_path / "benchmark.json"
    run("tools/benchmark.py", capsys, groups=["uci"], rounds=1, out=str(path))
    figures = json.loads(path.read_text())
    assert figures["uci"]["nominal"]["times_nominal"] == 1.0
