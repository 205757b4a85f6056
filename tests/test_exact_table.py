"""The table of exact certificates: the page is made of the figures."""

import json

from tests.test_tools import ROOT, load, run


def test_the_page_is_made_of_the_table():
    state = json.loads((ROOT / "docs" / "exact.json").read_text())
    tool = load("tools/exact_table.py")
    assert (ROOT / "docs" / "exact.md").read_text() == tool.page(state)
    for name, found in state["done"].items():
        # Proofs, truth and attacks are in this order.
        assert found["rub"] <= found["alpha-rub"] <= found["auto"], name
        assert found["auto"] <= found["exact"] <= found["attacked"], name
        assert found["decided"] >= 0.95, name
        assert found["attacked"] <= found["clean"], name


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
