"""Categories: columns that switch, at a price."""

import json

import numpy as np
import pytest

from keras_rub import Category, Ordinal, PerturbationSet

TABLE = [[0, 0.3, 2.0], [0.4, 0, None], [0.2, 0.9, 0]]

# Two numbers, a category with a table of prices, another with one price, and
# a grade.
GROUPS = [Category([2, 3, 4], TABLE), Category([5, 6], 0.5), Ordinal(7, 2, 0.3)]
LOW = [-1.0, -1.0, 0, 0, 0, 0, 0, 0.0]
HIGH = [1.0, 1.0, 1, 1, 1, 1, 1, 8.0]


def attacker(**parts):
    return PerturbationSet(
        **{"categories": GROUPS, "input_range": (LOW, HIGH), **parts}
    )


def row(numbers, first, second, grade):
    return [*numbers, *np.eye(3)[first], *np.eye(2)[second], grade]


X = np.array(
    [row([0.0, 0.5], 0, 1, 4.0), row([-0.3, 1.0], 2, 0, 0.0)], "float32"
)


def test_round_trips():
    found = attacker(mask=[0, 1, 1, 1, 1, 1, 1, 1])
    config = json.loads(json.dumps(found.get_config()))
    assert PerturbationSet.from_config(config) == found
    assert PerturbationSet.from_config(config).key == found.key
    assert found.key != attacker().key
    assert found.replace(mask=None) == attacker()
    assert hash(GROUPS[0]) == hash(Category((2, 3, 4), TABLE))
    assert str(attacker()).endswith("2 categories, 1 ordinal")
    assert "categories" not in PerturbationSet().get_config()
    assert attacker().numeric((8,)).mask.tolist() == [True] * 2 + [False] * 6


def test_prices():
    np.testing.assert_array_equal(
        GROUPS[0].prices,
        [[np.inf, 0.3, 2.0], [0.4, np.inf, np.inf], [0.2, 0.9, np.inf]],
    )


@pytest.mark.parametrize(
    ("point", "rho", "inside"),
    [
        (row([0.0, 0.5], 0, 1, 4.0), 0.0, True),
        (row([0.0, 0.5], 1, 1, 4.0), 0.3, True),
        (row([0.0, 0.5], 1, 1, 4.0), 0.2999, False),
        (row([0.0, 0.5], 2, 1, 4.0), 1.9, False),
        (row([0.1, 0.5], 1, 0, 4.0), 0.9, True),
        (row([0.2, 0.5], 1, 0, 4.0), 0.9, False),
        (row([0.0, 0.5], 0, 1, 8.0), 0.6, True),
        (row([0.0, 0.5], 0, 1, 6.0), 0.2999, False),
        (row([0.0, 0.5], 0, 1, 5.0), 9.0, False),
        (row([0.0, 0.5], 0, 1, 10.0), 9.0, False),
        ([0.0, 0.5, 0.5, 0.5, 0, 0, 1, 4.0], 9.0, False),
        ([0.0, 0.5, 0, 0, 0, 0, 1, 4.0], 9.0, False),
    ],
)
def test_contains(point, rho, inside):
    found = attacker().contains(X[:1], np.array([point]), rho)
    assert found.tolist() == [inside]


MISTAKES = {
    "must not share columns": lambda: attacker(
        categories=[Category([1, 2]), Category([2, 3])]
    ),
    "two or more different": lambda: Category([3]),
    "counted from": lambda: Category(["red", "blue"]),
    "`price` must be finite": lambda: Category([0, 1], price=0.0),
    "a table of 2 rows": lambda: Category([0, 1], price=[[0, 1]]),
    "above 0 between": lambda: Category([0, 1], price=[[0, -1], [1, 0]]),
    "one switch at least": lambda: Category(
        [0, 1], price=[[0, None], [None, 0]]
    ),
    "`step` of an Ordinal": lambda: Ordinal(0, step=0),
    "`price` of an Ordinal": lambda: Ordinal(0, price=np.inf),
    "keras_rub.Category and": lambda: attacker(categories=[[1, 2]]),
    "need norm 1": lambda: attacker(norm=2),
    "need norm 1,": lambda: attacker().with_norm("inf"),
    "`mask` must be true": lambda: attacker(
        mask=[1, 1, 0, 1, 1, 1, 1, 1]
    ).check_shape((8,)),
    "`weights` must be 1": lambda: attacker(
        weights=[1, 1, 1, 1, 1, 1, 1, 2]
    ).check_shape((8,)),
    "must hold 0 and 1": lambda: attacker(input_range=(0.5, 9.0)).check_shape(
        (8,)
    ),
    "columns below 6": lambda: attacker(input_range=None).check_shape((6,)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        MISTAKES[words]()
    assert "Received:" in str(caught.value)
    assert "\n" not in str(caught.value)
