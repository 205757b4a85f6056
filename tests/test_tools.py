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


def test_evaluate(tmp_path, capsys):
    from absl import app

    out = str(tmp_path / "run")
    run(
        "tools/train.py",
        capsys,
        dataset="wine",
        defense="pgd",
        norm="inf",
        rho=0.1,
        steps=40,
        out=out,
    )
    settings = {
        "model": f"{out}/model.keras",
        "dataset": "wine",
        "norms": ["1", "inf"],
        "radii": "1:0.2,0.5;inf:0.1",
        "attacks": ["pgd", "apgd-ce"],
        "report": str(tmp_path / "report.html"),
    }
    module = load("tools/evaluate.py")
    whole, module._CHUNK = module._CHUNK, 20
    try:
        # Interrupted after the first part, it goes on with the second.
        real, calls = module.keras_rub.evaluate, []

        def interrupted(*args, **kwargs):
            if calls:
                raise KeyboardInterrupt
            calls.append(1)
            return real(*args, **kwargs)

        module.keras_rub.evaluate = interrupted
        with pytest.raises(KeyboardInterrupt):
            run("tools/evaluate.py", capsys, **settings)
        module.keras_rub.evaluate = real
        with pytest.raises(app.UsageError, match="seed differ"):
            run("tools/evaluate.py", capsys, **settings, seed=1)
        printed = run("tools/evaluate.py", capsys, **settings)
    finally:
        module._CHUNK, module.keras_rub.evaluate = whole, real
    assert "resuming: 1 of 2 parts done" in printed
    assert "apgd-ce" in printed and "36 samples" in printed
    page = (tmp_path / "report.html").read_text()
    for text in ("standardised", "keras_rub", "dense"):
        assert text in page
    for ending in ("csv", "json", "md"):
        assert (tmp_path / f"report.{ending}").stat().st_size > 100
    assert not (tmp_path / "report.state.json").exists()
    for wrong, message in (
        ({"model": "nowhere.keras"}, "no model at"),
        ({"attacks": ["best"]}, "Unknown attack 'best'"),
        ({"radii": "a,b"}, "--radii must be"),
        ({"dataset": "wien"}, "Near names: .*'wine'"),
        ({"data": "x.csv"}, "not both"),
    ):
        with pytest.raises(app.UsageError, match=message):
            run("tools/evaluate.py", capsys, **{**settings, **wrong})


def test_evaluate_a_saved_model(tmp_path, capsys):
    """Of any origin: it is attacked, but can't be certified."""
    import keras

    import keras_rub

    keras.utils.set_random_seed(0)
    base = keras_rub.models.mlp((4,), 3, hidden=(8,))
    base.export(str(tmp_path / "saved"), verbose=False)
    printed = run(
        "tools/evaluate.py",
        capsys,
        model=str(tmp_path / "saved"),
        dataset="iris",
        norms=["2"],
        radii="0.5",
        attacks=["pgd"],
        report=str(tmp_path / "report.html"),
    )
    assert "note: No certificate" in printed and "30 samples" in printed


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
