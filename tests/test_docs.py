"""The code of README and guides runs, and the site builds."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import keras_rub
from keras_rub.cli.main import COMMANDS, main
from tests.test_architecture import FLOORS
from tests.test_tools import load

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# A block behind this comment is a sketch: it names things it does not make.
BLOCK = re.compile(r"(<!-- sketch -->\n)?```python\n(.*?)```", re.DOTALL)


@pytest.mark.medium
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(page, tmp_path, monkeypatch, few_samples):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    names = {"__name__": "docs"}
    for sketch, code in blocks:
        if not sketch:
            exec(compile(code, str(page), "exec"), names)
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
# So little work that README's commands can be run as they stand otherwise.
SMALL = {
    "train": ["--steps=5", "--architecture=mlp1"],
    "certify": ["--samples=4"],
    "evaluate": ["--samples=4"],
    "tune": ["--steps=5", "--samples=20", "--max_trials=1"],
    "export": [],
}


def calls(page, pattern):
    """What matches in the shell blocks, as lists of words."""
    for block in SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            call = re.search(pattern, line)
            if call:
                name, *words = shlex.split(call[1], comments=True)
                if "--help" not in (name, *words):
                    yield name, *[w for w in words if w not in ("&", ";")]


def commands(page):
    """The calls of keras-rub: a command's name and its flags."""
    for name, *words in calls(page, r"(?:keras-rub|python) (.*)"):
        name = name.removeprefix("tools/").removesuffix(".py")
        if name in COMMANDS:
            yield name, *words


def scripts(page):
    """The calls of other scripts: a path and its flags."""
    for path, *words in calls(page, r"python (\w+/\w+\.py.*)"):
        if pathlib.Path(path).stem not in COMMANDS:
            yield path, *words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_known_flags(page):
    for path, *words in scripts(page):
        load(path)
        with flagsaver.flagsaver():
            rest = flags.FLAGS([path, *words])
        assert rest[1:] == [], f"{path}: {rest[1:]}"
    for name, *words in commands(page):
        module = importlib.import_module(f"keras_rub.cli.{name}")
        if name == "serve":  # its first word is the folder
            words = [f"--models={words[0]}", *words[1:]]
        rest = module.FLAGS([name, *words])
        assert rest[1:] == [], f"{name}: {rest[1:]}"


@pytest.mark.medium
def test_commands_of_the_readme_in_order(
    tmp_path, monkeypatch, capsys, few_samples
):
    monkeypatch.chdir(tmp_path)
    found = [
        call
        for call in commands(PAGES[0])
        if "cifar10" not in call and "--data_dir" not in call
    ]
    assert {name for name, *_ in found} == set(SMALL)
    for name, *words in found:
        assert main([name, *words, *SMALL[name]]) == 0, words
    assert (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "models" / "digits" / "1").exists()


def test_site_builds_without_warnings(tmp_path):
    # Not with --quiet: warnings that are not printed do not count as such.
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict",
         "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "api" / "index.html").read_text()
    for name in ("RUBModel", "certify", "evaluate", "AdaptivePGD", "export"):
        assert name in page


def public_names():
    """All public names but modules, with what they mean."""
    modules = [keras_rub]
    for name in keras_rub.__all__:
        value = getattr(keras_rub, name)
        if inspect.ismodule(value):
            modules.append(value)
    for module in modules:
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if not (inspect.ismodule(value) or name == "__version__"):
                yield f"{module.__name__}.{name}", value


def test_api_page_has_all_public_names_and_no_others():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(documented) == len(set(documented))
    # Raises for a name that does not exist.
    found = [pkgutil.resolve_name(name) for name in documented]
    public = dict(public_names())
    assert len(public) > 40 and "keras_rub.models.mlp" in public
    absent = [
        name
        for name, value in public.items()
        # One of the names will do: `export` is `serving.export` too.
        if not any(value is other for other in found)
    ]
    assert absent == []
    known = {*public, "keras_rub.evaluation.html_report"}
    known.add("keras_rub.evaluation.plots")
    known.add("keras_rub.sklearn.RobustClassifier")  # imported on demand
    assert set(documented) <= known


def test_page_on_bounds_names_every_module_on_its_floor():
    folder = ROOT / "keras_rub" / "bounds"
    _, *pages = re.split(r"^## \d\. .*$", (folder / "README.md").read_text(),
                         flags=re.MULTILINE)  # fmt: skip
    pages[-1] = pages[-1].split("\n## ")[0]
    floors = [
        {name.removeprefix("bounds.") for name in floor}
        for floor in FLOORS
        if any(name.startswith("bounds.") for name in floor)
    ]
    named = [set(re.findall(r"^\| `(\w+)`", p, re.MULTILINE)) for p in pages]
    assert named == [floor - {"bounds"} for floor in floors]
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set().union(*named) == modules
