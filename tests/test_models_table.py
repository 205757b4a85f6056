"""The table of models: what the page says is what happens."""

import json

import pytest

from tests.test_tools import ROOT, load

TABLE = ROOT / "docs" / "models.json"

# One of each kind of answer; the slow suite tries every cell.
SOME = [
    ("softmax", "certify"),
    ("several inputs, dict", "aRUB"),
    ("one output, sigmoid", "COAP"),
    ("squeeze-and-excite", "RUB"),
    ("subclassed, tf.nn inside", "COAP"),
    ("integer input, Embedding", "PGD"),
    ("LSTM", "export"),
    ("subclassed", "export"),
]


@pytest.fixture
def tool():
    return load("tools/model_table.py")


def test_the_page_is_made_of_the_table(tool):
    table = json.loads(TABLE.read_text())
    assert list(table) == list(tool.CASES)
    assert len(table) >= 40
    assert all(list(cells) == list(tool.COLUMNS) for cells in table.values())
    assert (ROOT / "docs" / "models.md").read_text() == tool.page(table)


@pytest.mark.medium
@pytest.mark.parametrize("name, column", SOME)
def test_some_cells(tool, name, column):
    assert tool.try_cell(name, column) == table_of(name)[column]


@pytest.mark.slow
def test_all_cells(tool):
    for name in tool.CASES:
        for column in tool.COLUMNS:
            found = tool.try_cell(name, column)
            assert found == table_of(name)[column], (name, column)


def table_of(name):
    return json.loads(TABLE.read_text())[name]
