"""The mixed-integer program keeps every point, and keeps quiet."""

import ctypes
import os

import keras
import numpy as np
import pytest
from scipy import optimize

import keras_rub
from keras_rub import PerturbationSet
from keras_rub.bounds import exact, methods
from keras_rub.bounds.compiled import compiled_bounds
from keras_rub.bounds.exact import Encoding
from keras_rub.bounds.silence import without_lines
from tests.test_categories import GROUPS, HIGH, LOW, rows
from tests.test_categories import reached as points_of


def solver_of(model, attacker):
    bounds = compiled_bounds(
        model, attacker, dtype="float32", memory_budget=2**26, widest=None
    )
    return bounds.solver(methods.METHODS["exact"])


def leaky(seed):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8,))]
    for width in (5, 6):
        layers += [
            keras.layers.Dense(width, bias_initializer="glorot_normal"),
            keras.layers.LeakyReLU(0.2),
        ]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def holds(encoding, values):
    """Whether inputs and units of these values fit into the program."""
    limits = np.array(encoding.limits)
    limits[: len(values)] = np.array([values - 1e-5, values + 1e-5]).T
    matrix, low, high = encoding._matrix
    found = optimize.milp(
        np.zeros(len(limits)),
        integrality=encoding._integrality(),
        bounds=optimize.Bounds(*limits.T),
        constraints=optimize.LinearConstraint(matrix, low, high),
    )
    return found.status == 0


@pytest.mark.parametrize("norm", [1, "inf"])
def test_no_point_is_cut_off(norm):
    attacker = PerturbationSet(
        norm,
        weights=[1, 2, 1, 1, 1, 1, 1, 1],
        input_range=(LOW, HIGH),
        categories=GROUPS if norm == 1 else None,
        mask=None if norm == 1 else [1, 1, 0, 0, 0, 0, 0, 1],
    )
    solver = solver_of(leaky(3), attacker)
    rng, rho = np.random.default_rng(0), 0.9
    for x in rows(3, rng):
        encoding = Encoding(solver, x, rho)
        if norm == 1:
            points = points_of(attacker, x, rho, 20, rng)
        else:
            moves = rho * attacker.reach(x.shape) * rng.uniform(-1, 1, [60, 8])
            points = np.clip(x + moves, LOW, HIGH)
        points = points[rng.permutation(len(points))[:60]].astype("float64")
        for values in solver.network.values(points):
            assert holds(encoding, values)


def test_ranges_are_those_of_the_vertices():
    model = leaky(4)
    x = np.random.default_rng(1).normal(0, 0.3, 8).astype("float32")
    solver, rho = solver_of(model, PerturbationSet(1)), 0.7
    encoding = Encoding(solver, x, rho)
    for (low, high), before in zip(
        encoding.ranges, solver.ranges(x, rho), strict=True
    ):
        assert (low >= before[0]).all() and (high <= before[1]).all()
    assert (encoding.ranges[1][1] < solver.ranges(x, rho)[1][1] - 1e-3).any()


def test_climbs_stay_inside():
    model, rng = leaky(5), np.random.default_rng(2)
    for attacker in (
        PerturbationSet(1, input_range=(LOW, HIGH), categories=GROUPS),
        PerturbationSet("inf", input_range=(LOW, HIGH)),
    ):
        solver = solver_of(model, attacker)
        won = 0
        for x in rows(10, rng):
            label = int(model(x[None]).numpy().argmax())
            point = solver.climb(
                x, label, 1.0, [c for c in range(3) if c != label]
            )
            if point is not None:
                won += 1
                assert model(point[None]).numpy().argmax() != label
                assert attacker.contains(x[None], point[None], 1.0).all()
        assert won


def test_distance_is_that_of_the_nearest_point():
    # relu(x) - relu(-x) - 1 = x - 1: the class changes at 1.
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(2, "relu"),
            keras.layers.Dense(2),
        ]
    )
    model.set_weights(
        [
            np.array([[1.0, -1.0]]),
            np.zeros(2),
            np.array([[0.0, 1.0], [0.0, -1.0]]),
            np.array([1.0, 0.0]),
        ]
    )
    x = np.array([[0.25], [-3.0], [2.5], [-500.0]], "float32")
    found = keras_rub.certified_radius(
        model, x, method="exact", tolerance=0.001, max_radius=100.0
    )
    np.testing.assert_allclose(found, [0.75, 4.0, 1.5, 100.0], rtol=1.1e-3)
    assert (found <= [0.75, 4.0, 1.5, 100.0]).all()


# HiGHS prints one line, whatever its options say ------------------------------


def c_print(text):
    ctypes.CDLL(None).puts(text)


@pytest.mark.skipif(os.name != "posix", reason="No libc.")
def test_lines_are_dropped(capfd):
    c_print(b"before")
    with without_lines(b"Highs"):
        c_print(b"HighsMipSolverData::something")
        c_print(b"other words")
    c_print(b"after")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "before\nother words\nafter\n"
    with pytest.raises(KeyError), without_lines(b"Highs"):
        c_print(b"Highs")
        raise KeyError
    print("still here", flush=True)
    assert capfd.readouterr().out == "still here\n"


@pytest.mark.skipif(os.name != "posix", reason="No libc.")
def test_exact_is_silent(capfd, monkeypatch):
    milp = optimize.milp

    def chatty(*args, **settings):
        c_print(exact._CHATTER + b"transformNewIntegerFeasibleSolution")
        calls.append(1)
        return milp(*args, **settings)

    calls = []
    monkeypatch.setattr(optimize, "milp", chatty)
    model, x = leaky(6), rows(1, np.random.default_rng(3))
    label = int(model(x).numpy().argmax())
    solver = solver_of(model, PerturbationSet(1))
    rivals = [rival for rival in range(3) if rival != label]
    assert solver.decide(x[0], label, 1e-3, rivals, 10.0).proved
    ctypes.CDLL(None).fflush(None)
    assert calls and capfd.readouterr().out == ""
