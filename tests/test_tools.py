"""The command-line tools and the example, on embedded data."""

import importlib.util
import json
import pathlib
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parent.parent


def load(path):
    """Imports a script as a module, without running it."""
    name = f"script_{pathlib.Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        # Each script has its own flags; several share a process here.
        keep = flags.FLAGS._flags().copy()
        for flag in list(keep):
            if keep[flag].name in _SHARED:
                delattr(flags.FLAGS, flag)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


_SHARED = {
    "out", "dataset", "data_dir", "norm", "rho", "method", "samples", "model",
    "input_range", "epochs", "vertices",
}  # fmt: skip


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


def test_train_then_certify(tmp_path, capsys):
    out = str(tmp_path / "run")
    settings = {
        "dataset": "iris",
        "defense": "rub",
        "rho": 0.2,
        "steps": 40,
        "batch_size": 32,
        "out": out,
    }
    run("tools/train.py", capsys, **settings)
    history = (tmp_path / "run" / "history.csv").read_text().splitlines()
    assert len(history) == 21 and "clean_loss" in history[0]
    assert "finished" in run("tools/train.py", capsys, **settings)
    from absl import app

    with pytest.raises(app.UsageError, match="rho differ"):
        run("tools/train.py", capsys, **{**settings, "rho": 0.3})

    certified = {
        "model": f"{out}/model.keras",
        "dataset": "iris",
        "rho": ["0.05", "0.3"],
        "method": ["rub", "auto"],
        "samples": 30,
        "out": str(tmp_path / "certified"),
    }
    printed = run("tools/certify.py", capsys, **certified)
    assert "alpha" not in printed and "auto" in printed
    folder = tmp_path / "certified"
    rows = (folder / "results.csv").read_text().splitlines()
    assert rows[0] == "method,clean,0.05,0.3" and len(rows) == 3
    assert (folder / "certified.png").stat().st_size > 10_000
    # A part that is lost is done again, the others are not.
    state = json.loads((folder / "results.json").read_text())
    del state["done"]["auto:0"]
    (folder / "results.json").write_text(json.dumps(state))
    printed = run("tools/certify.py", capsys, **certified)
    assert "1 of 2 parts done" in printed
    assert (folder / "results.csv").read_text().splitlines() == rows
    with pytest.raises(app.UsageError, match="samples differ"):
        run("tools/certify.py", capsys, **{**certified, "samples": 20})
    with pytest.raises(app.UsageError, match="--method knows"):
        run("tools/certify.py", capsys, **{**certified, "method": ["ibp"]})
    with pytest.raises(app.UsageError, match="no valid range"):
        run(
            "tools/certify.py",
            capsys,
            **{**certified, "input_range": True, "out": str(tmp_path / "b")},
        )


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
