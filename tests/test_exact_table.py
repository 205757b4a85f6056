"""The table of exact certificates: a small run of the tool."""

import json

from tests.test_tools import load, run


def test_a_small_run(tmp_path, capsys):
    values = {"set": ["iris"], "rows": 4, "epochs": 2, "out": str(tmp_path)}
    tool = load("tools/exact_table.py")
    networks = dict(tool.NETWORKS)
    tool.NETWORKS.pop("2x32")
    try:
        run("tools/exact_table.py", capsys, **values)
    finally:
        tool.NETWORKS.update(networks)
    state = json.loads((tmp_path / "exact.json").read_text())
    assert list(state["done"]) == ["iris 1x16"]
    assert "| iris | 1x16 | 4 |" in (tmp_path / "exact.md").read_text()
