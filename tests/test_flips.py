"""The price of each decision, in the words of the table."""

import json

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub import datasets, tables
from keras_rub.cli import main
from tests.calling import arguments, call, refused
from tests.test_frames import SAID, people


@pytest.fixture(scope="module")
def trained():
    """A data set of mixed columns, and a plain network that learned it."""
    keras.utils.set_random_seed(0)
    data = datasets.load(people(), **SAID)
    base = keras_rub.models.mlp(
        data.input_shape, 2, hidden=(6,), preprocessing=data.preprocessing()
    )
    base.compile(
        keras.optimizers.Adam(0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    base.fit(*data.train, epochs=10, verbose=0)
    return data, base


@pytest.fixture(scope="module")
def found(trained):
    data, base = trained
    return keras_rub.flips(base, data.test[0][:12], data=data, method="rub")


def test_prices_are_true(trained, found):
    """Each change, made by hand on the row, flips it at the price it says."""
    data, base = trained
    x = data.test[0][:12]
    rows = data.decode(x)
    decisions = data.name_classes(base.predict(x, verbose=0))
    np.testing.assert_array_equal(found.predicted, decisions)
    won = np.isfinite(found.price)
    assert won.sum() >= 6
    assert np.all(found.certified <= found.price) and np.all(found.gap >= 0)
    attacker = data.perturbations
    for number in np.flatnonzero(won):
        row = dict(rows[number])
        for change in found.changes[number]:
            assert row[change.column] == change.before != change.after
            row[change.column] = change.after
        point = data.encode({k: [v] for k, v in row.items()})
        assert (
            data.name_classes(base.predict(point, verbose=0))[0]
            == (found.becomes[number])
        )
        assert found.becomes[number] != found.predicted[number]
        price = attacker.price(x[[number]], point)[0]
        assert price == pytest.approx(found.price[number], rel=1e-3)
        assert price == pytest.approx(
            sum(change.price for change in found.changes[number]), rel=1e-3
        )
        assert attacker.contains(x[[number]], point, price)[0]
        # What can't change does not.
        names = {change.column for change in found.changes[number]}
        assert "age" not in names


@pytest.mark.medium
def test_exact_leaves_no_gap(trained):
    data, base = trained
    found = keras_rub.flips(base, data.test[0][:8], data=data, method="exact")
    assert np.isfinite(found.price).all()
    assert (found.gap <= 0.021 * found.price + 1e-3).all()
    assert (found.gap >= 0).all()


def test_the_cheapest_is_cheap(trained, found):
    """No random change of the set flips a row below its certified price."""
    data, base = trained
    x = data.test[0][:12]
    rng = np.random.default_rng(0)
    attacker = data.perturbations
    for number in range(12):
        limit = found.certified[number]
        points = np.repeat(x[[number]], 200, axis=0)
        points[:, 1] += rng.uniform(-1, 1, 200) * limit / attacker.weights[1]
        points[100:, 7:9] = points[100:, 7:9][:, ::-1]  # member
        inside = attacker.contains(
            np.repeat(x[[number]], 200, axis=0), points, limit * 0.999
        )
        after = base.predict(points[inside], verbose=0).argmax(axis=1)
        before = base.predict(x[[number]], verbose=0).argmax()
        assert np.all(after == before)


def test_result(found, tmp_path):
    again = keras_rub.Flips.from_dict(json.loads(found.to_json()))
    assert again.to_dict() == found.to_dict()
    assert repr(again) == repr(found)
    assert "price in units of: standard deviations" in repr(found)
    assert list(found.to_frame().columns) == [
        "row", "decision", "certified", "price", "gap", "becomes", "changes",
    ]  # fmt: skip
    shares = list(found.usage.values())
    assert shares == sorted(shares, reverse=True) and shares[0] > 0
    assert set(found.usage) == set(found.columns) == {
        "age", "income", "home", "member", "grade", "rooms",
    }  # fmt: skip
    assert found.usage["age"] == 0.0


def test_plain_arrays(trained):
    """Without a data set columns have numbers, and the attacker is L1."""
    _, base = trained
    x = trained[0].test[0][:2]
    plain = keras_rub.flips(base, x, method="rub", max_price=0.01)
    assert plain.columns[3] == "3" and plain.attacker == "L1"
    assert plain.units == "the model's input"
    assert np.all(plain.certified <= 0.01)
    with pytest.raises(ValueError, match="`max_price` must be"):
        keras_rub.flips(base, x, max_price=-1.0)


def test_wilson():
    # From the formula, by hand: 8 of 10.
    assert tables.wilson(0.8, 10) == pytest.approx((0.49016, 0.94331), abs=1e-4)
    assert tables.wilson(0.0, 20)[0] == 0.0
    assert tables.wilson(1.0, 20) == pytest.approx((0.83887, 1.0), abs=1e-4)
    assert tables.percent_with_interval(0.8, 10) == "80.0% (49.0 to 94.3)"
    assert tables.percent_with_interval(None, 10) == ""


FLAGS = {
    "label": "answer",
    "categories": "home=2",
    "ordinal": "rooms,grade=low:middle:high",
    "immutable": "age",
    "weights": "income=2",
    "ranges": "income=0:10000000",
    "missing": "median",
}


@pytest.mark.medium
def test_commands_take_tables(tmp_path, capsys):
    path = tmp_path / "people.csv"
    people().to_csv(path, index=False)
    call(
        capsys, "train", dataset=path, **FLAGS, rho=0.2, steps=20,
        architecture="mlp1", out=tmp_path / "run",
    )  # fmt: skip
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["table"]["categories"] == {"home": 2.0}
    assert settings["class_names"] == ["no", "yes"]
    assert settings["columns"][0] == {
        "name": "age", "kind": "number", "inputs": [0, 1],
        "filled": settings["columns"][0]["filled"], "immutable": True,
    }  # fmt: skip
    ours = {"model": tmp_path / "run" / "model.keras", "radii": "0.1,0.5"}
    printed = call(
        capsys, "evaluate", **ours, samples=6, flips=2, attacks="switch",
        certificates="rub", report=tmp_path / "report.html",
    )  # fmt: skip
    assert "radius in units of: standard deviations" in printed
    assert "2 categories, 2 ordinal" in printed
    assert "2 rows, of which" in printed and " -> " in printed
    page = (tmp_path / "report.html").read_text()
    for text in (
        "Who can flip which decision", "<td class=\"class\">yes</td>",
        " to 100.0)", "standard deviations", "No change below",
    ):  # fmt: skip
        assert text in page, text
    line = refused(capsys, "certify", **ours, immutable="income")
    assert "--immutable contradicts the model's training" in line
    printed = call(
        capsys, "export", model=ours["model"], out=tmp_path / "models" / "m"
    )
    assert '"class_names": [' in printed and '"home"' in printed
    # The attacker comes back from the export.
    exported = call(
        capsys, "certify", model=tmp_path / "models" / "m" / "1",
        radii="0.1", method="rub", samples=6, out=tmp_path / "c",
    )  # fmt: skip
    assert "2 categories, 2 ordinal" in exported


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weights": "income"}, "--weights must be NAME=VALUE"),
        ({"weights": "income=much"}, "--weights must be NAME=VALUE"),
        ({"ranges": "income=3"}, "--ranges must be NAME=VALUE"),
        ({"categories": "home=2,,"}, "--categories must be names"),
        ({"immutable": "Age"}, "no column 'Age' for `immutable`"),
        ({"missing": "error"}, "missing, NaN or infinite values, in income"),
    ],
)
def test_bad_flags(flags, message, tmp_path, capsys):
    path = tmp_path / "people.csv"
    people().to_csv(path, index=False)
    said = {**FLAGS, **flags, "dataset": path, "out": tmp_path / "run"}
    assert message in refused(capsys, "train", **said)


def test_tune_takes_numbers_only(tmp_path, capsys):
    path = tmp_path / "people.csv"
    people().drop(columns="income").to_csv(path, index=False)
    assert main.main(["tune", *arguments({"dataset": path})]) == 1
    assert "categories know prices only" in capsys.readouterr().err
