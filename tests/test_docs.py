"""The Python blocks of README and guides run, and the site builds."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block behind this comment is a sketch: it names things it does not make.
BLOCK = re.compile(r"(<!-- sketch -->\n)?```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    names = {"__name__": "docs"}
    for sketch, code in blocks:
        if not sketch:
            exec(compile(code, str(page), "exec"), names)
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_site_builds_without_warnings(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet",
         "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "api" / "index.html").read_text()
    for name in ("RUBModel", "certify", "evaluate", "AdaptivePGD", "export"):
        assert name in page
