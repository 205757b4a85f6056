"""The wheel holds the library, and works away from the repository."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: building must not need the network.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir",
         str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (found,) = folder.glob("*.whl")
    return found


def test_content(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    assert {p for p in packages if "dist-info" not in p} == {"keras_rub"}
    for name in ("py.typed", "cli/main.py", "reproduction/paper_tables.csv"):
        assert f"keras_rub/{name}" in names
    (scripts,) = (n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(scripts).decode()
    assert "keras-rub = keras_rub.cli.main:main" in text
    assert any(name.endswith("LICENSE") for name in names)
    (metadata,) = (n for n in names if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for line in ("Name: keras-rub", "Provides-Extra: serving", "License"):
        assert line in text


@pytest.mark.slow
def test_quickstart_and_help_elsewhere(wheel, tmp_path):
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
         "--target", str(target), str(wheel)],
        check=True,
    )  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": str(target),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def run(script, *flags):
        return subprocess.run(
            [sys.executable, str(ROOT / script), *flags],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )

    where = "import keras_rub; print(keras_rub.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(target) in found
    shown = run("examples/quickstart.py", "--epochs=2", "--samples=20")
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "out" / "quickstart.png").exists()
    for name in ("benchmark", "draw_concepts", "tune"):
        helped = run(f"tools/{name}.py", "--help")
        assert "--out" in helped.stdout, helped.stderr
    script = target / "bin" / "keras-rub"
    listed = run(script, "--help")
    assert listed.returncode == 0, listed.stderr
    assert "certify" in listed.stdout
