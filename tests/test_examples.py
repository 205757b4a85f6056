"""Every example runs, with small settings."""

import json
import os
import pathlib
import subprocess
import sys

import matplotlib
import pytest

from tests.test_tools import ROOT, run

pytestmark = pytest.mark.medium

SMALL = {"epochs": 4, "samples": 8, "method": "rub"}


def test_tabular(tmp_path, capsys):
    picture = tmp_path / "tabular.png"
    printed = run("examples/tabular.py", capsys, **SMALL, out=str(picture))
    assert "certified to" in printed and "misread at" in printed
    changed = printed.split("in % of the budget")[1]
    # The mask holds: no feature of the size is named.
    for word in ("radius", "perimeter", "area"):
        assert word not in changed.split("Picture")[0]
    assert picture.stat().st_size > 20_000


def test_data_frame(tmp_path, capsys):
    printed = run("examples/data_frame.py", capsys, **SMALL, out=str(tmp_path))
    assert "8 rows, of which" in printed and "becomes" in printed
    assert "exported with the classes ['fast', 'slow']" in printed
    assert "'values': ['under', 'normal', 'over', 'obese']" in printed
    changes = (tmp_path / "flips.csv").read_text()
    assert "age: " not in changes and " -> " in changes
    for name in ("prices", "columns"):
        assert (tmp_path / f"{name}.png").stat().st_size > 8_000


def test_images(tmp_path, capsys, few_samples):
    picture = tmp_path / "images.png"
    printed = run(
        "examples/images.py", capsys, steps=60, samples=12, out=str(picture)
    )
    assert "apgd-targeted" in printed and "certified" in printed
    assert picture.stat().st_size > 10_000


def test_compare_defences(tmp_path, capsys, few_samples):
    picture = tmp_path / "compare.png"
    printed = run(
        "examples/compare_defences.py",
        capsys,
        steps=20,
        samples=12,
        architecture="mlp1",
        attack="pgd",
        method="crown",
        out=str(picture),
    )
    names = ("nominal", "baseline", "fgsm", "pgd", "arub", "rub", "coap")
    rows = {line.split()[0]: line.split() for line in printed.splitlines()[:8]}
    for name in names:
        clean, attacked, certified = (
            float(cell.rstrip("%")) for cell in rows[name][1:4]
        )
        assert clean >= attacked >= certified
    assert picture.stat().st_size > 10_000


def test_custom_layer(capsys):
    printed = run("examples/custom_layer.py", capsys, epochs=5, samples=20)
    assert "has no rule" in printed
    assert "more than rounding: 0 of 180" in printed


def test_notebook(capsys, monkeypatch, few_samples):
    monkeypatch.setenv("KERAS_RUB_EPOCHS", "2")
    monkeypatch.setenv("KERAS_RUB_SAMPLES", "10")
    matplotlib.use("Agg")
    path = ROOT / "examples" / "quickstart.ipynb"
    names, outputs = {"__name__": "notebook"}, []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
            outputs += cell["outputs"]
    assert "nominal" in capsys.readouterr().out
    # What is stored was run: printed text and one picture, and no error.
    kinds = [output["output_type"] for output in outputs]
    assert kinds.count("stream") >= 4 and "error" not in kinds
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 1


@pytest.mark.slow
def test_distributed_sweep(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "examples" / "distributed_sweep.sh"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "DATASET": "iris",
            "TRIALS": "3",
            "STEPS": "20",
            "SAMPLES": "20",
            "RADII": "1:0.2",
            "PORT": "23512",
            "OUT": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "attacked L1 0.2" in done.stdout
    logs = [pathlib.Path(tmp_path, f"worker{i}.log") for i in (0, 1)]
    assert all(log.exists() for log in logs)
