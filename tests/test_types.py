"""Types: public signatures are whole, and scripts are checked by them."""

import importlib
import inspect
import os
import pathlib
import subprocess
import sys

import keras_rub

ROOT = pathlib.Path(__file__).parent.parent
MODULES = (
    "attacks", "callbacks", "datasets", "metrics", "models", "serving",
)  # fmt: skip

# Methods of Keras that are overridden: Keras says what they take.
OVERRIDES = {
    "build", "call", "compile", "compile_from_config", "compute_output_spec",
    "evaluate", "fit", "from_config", "get_config", "on_epoch_begin",
    "on_epoch_end", "on_train_begin", "reset_state", "result",
    "test_on_batch", "test_step", "train_on_batch", "train_step",
    "update_state",
}  # fmt: skip

# What a subclass of ours fills in: the base class, which is annotated, says
# what they take.
HOOKS = {
    "objective", "prepare", "robust_loss", "robust_outputs", "run", "search",
}  # fmt: skip

# Still without a type of what they return.
OPEN: set[str] = set()


def is_ours(thing):
    return getattr(thing, "__module__", "").split(".")[0] == "keras_rub"


def public_things():
    """All that has a public name."""
    for name in keras_rub.__all__:
        yield getattr(keras_rub, name)
    for module_name in MODULES:
        module = importlib.import_module(f"keras_rub.{module_name}")
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        for name in names:
            yield getattr(module, name)


def is_inherited(owner, key):
    """Whether the signature is that of Keras, or of a hook."""
    parents = owner.__mro__[1:]
    if key in HOOKS:
        return any(key in vars(parent) for parent in filter(is_ours, parents))
    return key in OVERRIDES and any(
        hasattr(parent, key) for parent in parents if not is_ours(parent)
    )


def functions_of(thing):
    """A function, or the public methods of a class that are written here."""
    if inspect.isfunction(thing):
        yield thing
    if not inspect.isclass(thing):
        return
    for parent in filter(is_ours, thing.__mro__):
        for key, value in vars(parent).items():
            if key.startswith("_") and key not in ("__init__", "__call__"):
                continue
            if is_inherited(parent, key):
                continue
            if isinstance(value, property):
                value = value.fget
            value = getattr(value, "func", getattr(value, "__func__", value))
            if inspect.isfunction(value) and is_ours(value):
                yield value


FUNCTIONS = {
    function.__qualname__: function
    for thing in public_things()
    for function in functions_of(thing)
}


def missing(function):
    """What has no annotation: names of arguments, or `return`."""
    notes = function.__annotations__
    parameters = inspect.signature(function).parameters.values()
    found = [
        parameter.name
        for parameter in parameters
        if parameter.name not in notes
        and parameter.name not in ("self", "cls")
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if "return" not in notes and function.__name__ != "__init__":
        found.append("return")
    return found


def test_public_signatures_are_annotated():
    # What the walk must reach, or it proves nothing.
    assert len(FUNCTIONS) > 60
    assert FUNCTIONS.keys() >= {
        "certify",
        "RUBModel.__init__",
        "MarginModel.worst_case_margins",
        "PerturbationSet.contains",
        "PerturbationSet.from_config",
        "PerturbationSet.key",
        "Attack.__call__",
        "RhoSchedule.value",
        "write_config",
    }
    found = {name: missing(function) for name, function in FUNCTIONS.items()}
    found = {name: gaps for name, gaps in found.items() if gaps}
    assert found.keys() <= OPEN, found


def test_every_exception_is_needed():
    owners = {
        parent
        for thing in public_things()
        if inspect.isclass(thing)
        for parent in filter(is_ours, thing.__mro__)
    }
    for name in OVERRIDES | HOOKS:
        assert any(
            name in vars(owner) and is_inherited(owner, name)
            for owner in owners
        ), name


# As in the README. `assert_type` fails where a type is lost on the way.
SCRIPT = """
from typing import assert_type

import keras
import numpy as np

import keras_rub

base = keras.Sequential([keras.layers.Dense(2)])
model = keras_rub.RUBModel(base, rho=1.0, mask=[True, False])
model.compile("adam", loss="sparse_categorical_crossentropy")
data = keras_rub.datasets.load("digits")
ramp = keras_rub.callbacks.RhoSchedule(epochs=5)
look = keras_rub.callbacks.Certify(*data.validation, rho=[0.5], method="rub")
model.fit(*data.train, callbacks=[ramp, look])
x, y = data.test

result = keras_rub.certify(model, x, y, rho=0.5)
assert_type(result, keras_rub.Certificate)
assert_type(result.certified, np.ndarray)
assert_type(result.certified_accuracy, float)
each = keras_rub.certify(model, x, rho=np.full(len(x), 0.5))
assert_type(each, keras_rub.Certificate)

table = keras_rub.certify(model, x, y, rho=[0.1, 0.2], decide_only=True)
assert_type(table, keras_rub.CertificateTable)
for certificate in table:
    assert_type(certificate.certified_accuracy, float)
assert_type(table.certified_accuracy, np.ndarray)
assert_type(keras_rub.certified_radius(model, x), np.ndarray)

attacker = keras_rub.PerturbationSet("inf", mask=[True, False])
found = keras_rub.evaluate(
    model, x, y, radii={"inf": [0.05]}, perturbations=attacker
)
assert_type(found, keras_rub.Evaluation)
assert_type(found.warnings, list[str])
assert_type(attacker.with_norm(2), keras_rub.PerturbationSet)
keras_rub.certify(model, x, y, rho=0.5, perturbations=attacker)
attack = keras_rub.attacks.PGD(model, perturbations=attacker)
assert_type(attack(x, y, rho=0.1), np.ndarray)
keras_rub.export(model, "models/digits", perturbations=attacker)
"""

# From the mistake to the code of the error.
MISTAKES = {
    'keras_rub.certify(base, [], rho=0.5, methd="rub")': "call-overload",
    "keras_rub.certify(base, [])": "call-overload",
    "keras_rub.certify(base, [], rho=0.5).radii": "attr-defined",
    "keras_rub.certify(base, [], rho=[0.5]).certified": "attr-defined",
    'keras_rub.certified_radius(base, [], methd="rub")': "call-arg",
    "keras_rub.evaluate(base, [], [], radii=0.5)": "arg-type",
    "keras_rub.PerturbationSet(radius=1)": "call-arg",
    'keras_rub.callbacks.Certify([], [], 0.5, methd="rub")': "call-arg",
}


def test_scripts_of_users_are_checked(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(SCRIPT)
    head = "import keras\nimport keras_rub\n\nbase = keras.Model()\n"
    bad.write_text(head + "".join(f"{line}\n" for line in MISTAKES))
    done = subprocess.run(
        # Silent about this package itself, as it is where it is installed.
        [sys.executable, "-m", "mypy", "--follow-imports=silent",
         "--no-pretty", str(good), str(bad)],
        cwd=ROOT,  # its settings say that Keras has no types
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in errors if "bad.py" not in line], done.stdout
    first = len(head.splitlines()) + 1
    for number, (line, code) in enumerate(MISTAKES.items(), first):
        (error,) = [e for e in errors if f"bad.py:{number}: " in e] or [""]
        assert error.endswith(f"[{code}]"), (line, done.stdout, done.stderr)
