"""Tables as people have them: data frames and CSV files of mixed columns."""

import datetime
import json
import sys

import keras
import numpy as np
import pandas as pd
import pytest

import keras_rub
from keras_rub import datasets


def people(count=120, seed=0):
    """A table with numbers, words, booleans, steps and gaps."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 80, count)
    income = rng.lognormal(10, 0.5, count).round(2)
    frame = pd.DataFrame(
        {
            "age": age,
            "income": income,
            "home": rng.choice(["own", "rent", "free"], count),
            "member": rng.random(count) < 0.4,
            "grade": rng.choice(["low", "middle", "high"], count),
            "rooms": rng.integers(1, 6, count),
            "answer": np.where(age + rng.normal(0, 5, count) > 45, "yes", "no"),
        }
    )
    frame.loc[::7, "income"] = np.nan
    frame.loc[::11, "home"] = None
    return frame


SAID = {
    "label": "answer",
    "ordinal": {"rooms": None, "grade": ["low", "middle", "high"]},
    "categories": {"home": {"own": {"rent": 3.0, "free": np.inf}}},
    "immutable": ["age"],
    "weights": {"income": 2.0},
    "ranges": {"income": (0.0, 1e7)},
    "missing": "median",
}


@pytest.fixture(scope="module")
def mixed():
    return datasets.load(people(), **SAID)


def test_columns_become_inputs(mixed):
    assert mixed.feature_names == (
        "age", "income", "income is missing",
        "home=free", "home=own", "home=rent", "home=(missing)",
        "member=False", "member=True", "grade", "rooms",
    )  # fmt: skip
    assert mixed.class_names == ("no", "yes") and mixed.label == "answer"
    assert mixed.normalization == "inside" and mixed.num_classes == 2
    x = np.concatenate([part[0] for part in (mixed.train, mixed.test)])
    for group in (slice(3, 7), slice(7, 9)):
        assert np.all(x[:, group].sum(axis=1) == 1)
    gaps = x[:, 2] == 1
    known = mixed.train[0][mixed.train[0][:, 2] == 0, 1]
    assert gaps.any()
    np.testing.assert_allclose(x[gaps, 1], np.median(known), rtol=1e-6)
    assert set(x[:, 9]) == {0.0, 1.0, 2.0}


def test_attacker_follows_from_the_columns(mixed):
    found = mixed.perturbations
    deviation = mixed.train[0].astype("float64").std(axis=0)
    assert found.mask.tolist() == [False, True, False, *[True] * 8]
    assert found.weights[1] == pytest.approx(2.0 / deviation[1])
    np.testing.assert_array_equal(np.delete(found.weights, 1), 1.0)
    low, high = found.input_range
    assert (low[1], high[1]) == (0.0, 1e7) and (low[9], high[9]) == (0, 2)
    assert np.isinf(low[0]) and np.isinf(high[10])
    home, member, grade, rooms = found.categories
    own = home.columns.index(4)
    np.testing.assert_array_equal(home.prices[own], [np.inf, np.inf, 3.0, 1.0])
    assert member == keras_rub.Category([7, 8], 1.0)
    assert grade.step == 1.0
    assert grade.price == pytest.approx(1.0 / deviation[9])
    assert rooms.price == pytest.approx(1.0 / deviation[10])
    assert "standard deviations of the training rows" in mixed.units
    assert "a switch of a category costs 1 to 3" in mixed.units


@pytest.mark.parametrize("normalization", ["standard", "unit", "none"])
def test_the_attacker_is_the_same_in_all_units(mixed, normalization):
    """Standardised outside or inside: the same points cost the same."""
    other = datasets.load(people(), normalization=normalization, **SAID)
    scale = np.broadcast_to(other.raw_scale, other.input_shape)
    ordinal = [g for g in other.perturbations.categories if len(g.columns) == 1]
    for group in ordinal:
        # One step is one of the raw column, at the price of its length.
        assert group.step == pytest.approx(1 / scale[group.column])
        assert group.price == pytest.approx(group.step)
    low, high = (
        end * scale + np.broadcast_to(other.raw_shift, other.input_shape)
        for end in other.perturbations.input_range
    )
    assert (low[1], high[1]) == pytest.approx((0.0, 1e7), abs=2.0)
    assert low[1] <= 0.0 and high[1] >= 1e7  # no valid row is refused
    assert other.perturbations.weights[1] == 2.0
    np.testing.assert_allclose(
        other.encode(other.to_frame()), other.test[0], atol=1e-5
    )


def test_frame_and_file_are_the_same(mixed, tmp_path):
    path = tmp_path / "people.csv"
    people().to_csv(path, index=False)
    again = datasets.load(path, **SAID)
    assert again.schema == mixed.schema
    assert again.perturbations == mixed.perturbations
    as_dict = datasets.load(people().to_dict("list"), **SAID)
    assert as_dict.schema == mixed.schema
    # All that a data frame can hold a column in.
    odd = people()
    odd["member"] = odd["member"].astype("boolean")
    odd["income"] = odd["income"].astype("Float64")
    odd["home"] = odd["home"].astype("category")
    odd["rooms"] = odd["rooms"].astype("Int8")
    steps = pd.CategoricalDtype(["low", "middle", "high"], ordered=True)
    odd["grade"] = odd["grade"].astype(steps)
    ordinal = {**SAID, "ordinal": ["rooms"]}  # the order is the column's own
    assert datasets.load(odd, **ordinal).schema == mixed.schema
    for other in (again, as_dict, datasets.load(odd, **ordinal)):
        for part in ("train", "validation", "test"):
            for one, two in zip(
                getattr(mixed, part), getattr(other, part), strict=True
            ):
                np.testing.assert_array_equal(one, two)


def test_rows_and_their_words(mixed):
    frame = people()
    x = mixed.encode(frame)
    back = mixed.decode(x)
    for name in ("age", "grade", "rooms"):
        assert [row[name] for row in back] == frame[name].tolist()
    assert [row["home"] for row in back] == (
        frame["home"].fillna("(missing)").tolist()
    )
    assert [row["member"] == "True" for row in back] == frame["member"].tolist()
    income = np.array([row["income"] for row in back], "float64")
    np.testing.assert_allclose(income, frame["income"], rtol=1e-6)
    shown = mixed.to_frame("test")
    np.testing.assert_array_equal(mixed.encode(shown), mixed.test[0])
    assert set(shown["answer"]) == {"yes", "no"}
    outputs = np.array([[0.0, 1.0], [2.0, 1.0]])
    assert mixed.name_classes(outputs).tolist() == ["yes", "no"]
    assert mixed.name_classes([[0.5], [-0.5]]).tolist() == ["yes", "no"]


def test_metadata_is_all_that_a_client_needs(mixed):
    """Rows can be encoded from the facts of the export alone."""
    frame = people().fillna({"home": "(missing)"})
    for data in (
        mixed,
        datasets.load(people(), normalization="standard", **SAID),
    ):
        facts = json.loads(json.dumps(data.metadata))
        assert facts["class_names"] == ["no", "yes"]
        x = np.zeros((len(frame), data.schema.size))
        for column in facts["columns"]:
            values, (start, end) = frame[column["name"]], column["inputs"]
            if column["kind"] == "category":
                for place, word in enumerate(column["values"]):
                    x[:, start + place] = values.astype(str) == word
                continue
            if "values" in column:
                values = values.map(column["values"].index)
            filled = values.fillna(column["filled"])
            shift, scale = column.get("shift", 0.0), column.get("scale", 1.0)
            x[:, start] = (filled - shift) / scale
            if end > start + 1:
                x[:, start + 1] = values.isna()
        np.testing.assert_allclose(
            x, data.encode(people()), rtol=1e-5, atol=1e-6
        )


def test_unseen_categories():
    frame = people(200)
    frame.loc[:2, "home"] = ["boat", "tent", "cave"]
    said = {**SAID, "categories": ()}
    with pytest.raises(ValueError, match="'home' holds '.*no training row has"):
        datasets.load(frame, **said)
    data = datasets.load(frame, **said, unseen="other")
    column = data.schema.columns[2]
    # Those of few training rows are the others; a gap is a category.
    assert column.values == ("free", "own", "rent", "(missing)", "(other)")
    new = frame.drop(columns="answer").iloc[:4].copy()
    new.loc[3, "home"] = "castle"
    homes = [row["home"] for row in data.decode(data.encode(new))]
    assert homes == ["(other)"] * 4
    closed = datasets.load(people(), **said)
    with pytest.raises(ValueError, match="'castle', which no training row"):
        closed.encode(new.iloc[3:])
    with pytest.raises(ValueError, match="no column 'age'. Its columns"):
        closed.encode(new.drop(columns="age"))
    with pytest.raises(ValueError, match="'maybe', which is none of its steps"):
        closed.encode(new.iloc[3:].assign(home="own", grade="maybe"))


def test_missing_values():
    plain = people()[["age", "income", "home", "answer"]]
    for rule, names in (
        ("mean", ("age", "income")),
        ("median", ("age", "income", "income is missing")),
    ):
        data = datasets.load(plain, missing=rule)
        assert data.feature_names[: len(names)] == names
        assert np.all(np.isfinite(data.test[0]))
    dropped = datasets.load(plain, missing="drop")
    parts = (dropped.train, dropped.validation, dropped.test)
    assert sum(len(y) for _, y in parts) == len(plain.dropna())
    assert "home=(missing)" not in dropped.feature_names
    # Gaps that only come later have a rule too.
    whole = plain.fillna({"income": 1.0})
    data = datasets.load(whole, missing="median")
    assert "income is missing" not in data.feature_names
    x = data.encode(plain.iloc[:1])
    assert x[0, 1] == np.median(data.train[0][:, 1])


def test_scaling_is_inside_the_model(mixed):
    layer = mixed.preprocessing()
    z = keras.ops.convert_to_numpy(layer(mixed.train[0]))
    np.testing.assert_allclose(z[:, [0, 1, 9, 10]].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(z[:, [0, 1, 9, 10]].std(axis=0), 1, atol=1e-4)
    np.testing.assert_array_equal(z[:, 2:9], mixed.train[0][:, 2:9])
    base = keras_rub.models.mlp((11,), 2, (4,), preprocessing=layer)
    assert base.layers[0] is layer
    clone = keras.Sequential.from_config(base.get_config())
    clone.set_weights(base.get_weights())
    np.testing.assert_allclose(clone(z), base(z), rtol=1e-6)


def test_nearly_constant_columns():
    frame = people().assign(site="here", level=7.0)
    with pytest.warns(UserWarning, match="Hardly varying.*: site, level. A"):
        data = datasets.load(frame, **SAID)
    # A category without another can't be switched.
    assert len(data.perturbations.categories) == 4
    assert not data.perturbations.mask[data.feature_names.index("site=here")]


def with_column(name, values):
    """The table with one column more."""
    frame = people()
    return frame.assign(**{name: values})


DAY = datetime.date(2020, 1, 1)

BAD = {
    "dates": (
        lambda: with_column("day", pd.date_range("2020-01-01", periods=120)),
        {},
        "'day' holds dates.*`ignore`",
    ),
    "date objects": (
        lambda: with_column("day", [DAY] * 120),
        {},
        "'day' holds dates.*2020-01-01",
    ),
    "dates as text": (
        lambda: with_column("day", ["2020-01-03"] * 120),
        {},
        "'day' holds dates",
    ),
    "durations": (
        lambda: with_column("wait", pd.to_timedelta(range(120), unit="D")),
        {},
        "'wait' holds dates",
    ),
    "names of people": (
        lambda: with_column("name", [f"person {i}" for i in range(120)]),
        {},
        "'name' holds 72 different words.*too many",
    ),
    "lists": (
        lambda: with_column("list", [[1, 2]] * 120),
        {},
        "'list' must hold numbers, words or booleans.*list",
    ),
    "several kinds": (
        lambda: with_column("odd", ["a", 1] * 60),
        {},
        "'odd' must hold.*not several kinds.*int, str",
    ),
    "complex numbers": (
        lambda: with_column("z", [1j] * 120),
        {},
        "'z' must hold numbers.*complex",
    ),
    "an empty column": (
        lambda: with_column("void", [np.nan] * 120),
        {},
        "'void' holds no value",
    ),
    "a gap": (people, {"missing": "error"}, "18 missing.*in income. Choose"),
    "two columns of one name": (
        lambda: pd.concat([people(), people()[["age"]]], axis=1),
        {},
        r"two columns of the same name: \['age'\]",
    ),
    "no such label": (people, {"label": "x"}, "no column 'x' for `label`"),
    "a label with gaps": (
        people,
        {"label": "home", "categories": ()},
        "'home' must hold a class in every row.*11 rows",
    ),
    "one class": (
        lambda: people().assign(answer="yes"),
        {},
        r"at least two classes. Received: \['yes'\]",
    ),
    "a measured label": (
        lambda: people().drop(columns="answer"),
        {"label": "income", "weights": {}, "ranges": {}, "missing": "drop"},
        "must hold classes, not measurements",
    ),
    "too few rows": (lambda: people(3), {}, "at least 4 rows"),
    "no such column": (
        people,
        {"immutable": ["Age"]},
        "no column 'Age' for `immutable`. Its columns: .*'age'",
    ),
    "nothing to ignore": (people, {"ignore": ["id"]}, "'id' for `ignore`"),
    "words without order": (
        people,
        {"ordinal": ["grade"]},
        "'grade' holds words, so `ordinal` must give their order",
    ),
    "a step that is none": (
        people,
        {"ordinal": {"grade": ["low", "high"]}},
        "'grade' holds 'middle', which is none of its steps",
    ),
    "broken steps": (
        people,
        {"ordinal": ["income"]},
        "'income' of `ordinal` must hold whole numbers",
    ),
    "both kinds": (
        people,
        {"categories": ["rooms"], "ordinal": ["rooms"]},
        "'rooms' can't be in `categories` and in `ordinal`",
    ),
    "a price of nothing": (
        people,
        {"categories": {"home": 0.0}},
        "price of a switch must be above 0.*0.0 for 'home'",
    ),
    "a price of no category": (
        people,
        {"categories": {"home": {"own": {"boat": 1.0}}}},
        "names 'boat', which is none of its categories",
    ),
    "weight of a category": (
        people,
        {"weights": {"home": 2.0}},
        "`weights` is for numbers, but column 'home'",
    ),
    "a weight of 0": (
        people,
        {"weights": {"age": 0}},
        "`weights` must be finite and above 0.*0 for 'age'",
    ),
    "a range without its rows": (
        people,
        {"ranges": {"age": (0, 30)}},
        "'age' holds .*, outside its `ranges`",
    ),
    "a range upside down": (
        people,
        {"ranges": {"age": (90, 0)}},
        r"`ranges` must be pairs.*\(90, 0\) for 'age'",
    ),
    "names as one word": (
        people,
        {"immutable": "age"},
        "`immutable` must be a list of names",
    ),
    "weights as a list": (people, {"weights": [1]}, "`weights` must be a dict"),
    "a rule that is none": (people, {"unseen": "drop"}, "`unseen` must be one"),
    "no table": (lambda: [1, 2], {}, "`name` must be the name.*list"),
    "rows of different length": (
        lambda: {"a": [1, 2, 3, 4], "b": [1, 2], "answer": [0, 1, 0, 1]},
        {"ordinal": (), "categories": (), "immutable": (), "weights": {},
         "ranges": {}},
        "the same length",
    ),
    "words for a data set by name": (
        lambda: "iris",
        {},
        "Only a data frame or a CSV file takes label, categories",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(case):
    make, said, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        datasets.load(make(), **{**SAID, **said})
    assert "\n" not in str(caught.value)


BAD_FILES = {
    "a slip": ("a,b,c\n" + "1,2,x\n2,3,y\n" * 20 + "oops,3,y\n",
               "line 42: column 'a' holds 'oops' among numbers"),
    "an index": (",a,c\n" + "1,2,x\n2,3,y\n" * 4, "column 1 has no name"),
    "dates": ("a,b,c\n" + "1,3.4.2020,x\n2,4.4.2021,y\n" * 4,
              "'b' holds dates"),
    "a row too short": ("a,b,c\n" + "1,2,x\n2,3,y\n" * 4 + "1,2\n",
                        "line 10: 2 cells, but the header has 3"),
    "no rows": ("a,b,c\n", "a header and rows are needed"),
    "nothing": ("", "needs a column for the label"),
    "bytes": (b"\xff\xfe\x00a", "is no CSV file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, tmp_path):
    text, message = BAD_FILES[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        datasets.load(path)
    assert "\n" not in str(caught.value)


def test_without_pandas(mixed, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"keras-rub\[pandas\]"):
        mixed.to_frame()
