"""The table of exact certificates: the page, and a small run of the tool."""

import json

import pytest

from tests.test_tools import ROOT, load, run


@pytest.fixture
def tool():
    return load("tools/exact_table.py")


@pytest.fixture
def state():
    return json.loads((ROOT / "docs" / "exact.json").read_text())


def test_the_page_is_made_of_the_table(tool, state):
    assert (ROOT / "docs" / "exact.md").read_text() == tool.page(state)


def test_five_sets_and_two_networks(tool, state):
    sets = state["settings"]["set"]
    assert len(sets) == 5 and state["settings"]["time_limit"] <= 10
    assert list(state["done"]) == [
        f"{name} {network}" for name in sets for network in ("1x16", "2x32")
    ]
    for found in state["done"].values():
        assert set(tool.HEADER[2:]) <= set(found)
        assert found["rows"] >= 40
        assert found["decided"] >= 0.95


def test_no_bound_is_above_the_truth(state):
    for name, found in state["done"].items():
        assert found["rub"] <= found["alpha-rub"] <= found["auto"], name
        assert found["auto"] <= found["exact"] <= found["attacked"], name
        assert found["attacked"] <= found["clean"], name
    # Else there is nothing to see.
    assert any(
        found["rub"] < found["exact"] for found in state["done"].values()
    )


def test_a_small_run(tmp_path, capsys, tool):
    values = {"set": ["iris"], "rows": 4, "epochs": 2, "out": str(tmp_path)}
    networks = dict(tool.NETWORKS)
    tool.NETWORKS.pop("2x32")
    try:
        run("tools/exact_table.py", capsys, **values)
    finally:
        tool.NETWORKS.update(networks)
    state = json.loads((tmp_path / "exact.json").read_text())
    assert list(state["done"]) == ["iris 1x16"]
    assert "| iris | 1x16 | 4 |" in (tmp_path / "exact.md").read_text()
