"""The wheel holds the library, and works away from the repository."""

import ast
import os
import pathlib
import runpy
import subprocess
import sys
import zipfile

import pytest

from keras_rub import zoo

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
    (sdist,) = folder.glob("*.tar.gz")
    (found,) = folder.glob("*.whl")
    # As `make package` does: a description that an index can show.
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", sdist, found],
        check=True,
        capture_output=True,
    )
    return found


def test_content(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    assert {p for p in packages if "dist-info" not in p} == {"keras_rub"}
    # The types are in the modules themselves; py.typed says so to checkers.
    for name in ("py.typed", "cli/main.py", "reproduction/paper_tables.csv"):
        assert f"keras_rub/{name}" in names
    assert not any(name.endswith(".keras") for name in names)
    source = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("keras_rub/**/*.py")
    }
    assert source <= set(names)
    (scripts,) = (n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(scripts).decode()
    assert "keras-rub = keras_rub.cli.main:main" in text
    assert any(name.endswith("LICENSE") for name in names)
    (metadata,) = (n for n in names if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for line in ("Name: keras-rub", "Provides-Extra: serving", "License"):
        assert line in text


def test_ranges_are_those_of_the_matrix():
    """Nothing is allowed that noxfile.py does not try."""
    rows = matrix_rows()
    required = (ROOT / "setup.py").read_text()
    for number, package in ((1, "tensorflow"), (2, "keras")):
        tried = [tuple(map(int, row[number].split("."))) for row in rows]
        low, high = min(tried), max(tried)
        limits = f"{package}>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"
        assert f'"{limits}"' in required
        serving = f'"tensorflow-serving-api>={low[0]}.{low[1]},'
        assert package != "tensorflow" or serving in required
    pythons = sorted(int(row[0].split(".")[1]) for row in rows)
    limits = f">=3.{pythons[0]},<3.{pythons[-1] + 1}"
    assert f'python_requires="{limits}"' in required


def matrix_rows():
    """ROWS of noxfile.py, which needs nox to be imported."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (rows,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", None) == "ROWS"
    )
    return list(ast.literal_eval(rows).values())


def test_the_tag_names_the_version():
    check = runpy.run_path(str(ROOT / "tools" / "check_tag.py"))["problem"]
    source = '__version__ = "1.2.3"\n'
    assert check("v1.2.3", source) is None
    assert "must be v1.2.3" in check("v1.2.4", source)
    assert "no line" in check("v1.2.3", "")


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


def test_no_data_is_tracked():
    """Data and models stay outside, but for the zoo; result files are small."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout.decode()
    kept = 0
    for name in names.strip("\0").split("\0"):
        path = ROOT / name
        kind = path.relative_to(ROOT).parent, path.suffix
        of_zoo = kind == (pathlib.Path("zoo"), ".keras")
        kept += of_zoo
        most = zoo.MOST_BYTES if of_zoo else 1_000_000
        assert not path.is_symlink(), name
        assert not path.exists() or path.stat().st_size < most, name
        assert (
            path.suffix not in (".npz", ".keras") or of_zoo or "golden" in name
        ), name
    assert kept <= zoo.MOST_FILES
    assert (zoo.MOST_FILES, zoo.MOST_BYTES) == (12, 1_500_000)
