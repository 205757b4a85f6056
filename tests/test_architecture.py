"""The house: imports point one way, and private names stay at home."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "keras_rub"

# From the ground up. A module may import from its own floor and from those
# below. The first entry that a module's name starts with counts.
FLOORS = [
    [
        "version",
        "categories",
        "keras_internals",
        "perturbations",
        "files",
        "tables",
        "progress",
        "tracing",
    ],
    [
        "resuming",
        "checks",
        "classifier",
        "inputs",
        "cautions",
        "models",
        "zoo",
        "loading",
        "initializers",
    ],
    [
        "bounds.lines",
        "bounds.program",
        "bounds.activations",
        "bounds.lowering",
        "bounds.rules",
    ],
    [
        "bounds.radii",
        "bounds.maxima",
        "bounds.knapsack",
        "bounds.competitors",
        "bounds.majorant",
        "bounds.first_layer",
        "bounds.vertex_expansion",
        "bounds.patches",
        "bounds.vertices",
        "bounds.windows",
        "bounds.linearised",
        "bounds.kinks",
        "bounds.intervals",
        "bounds.local",
        "bounds.linear",
        "bounds.first_order",
        "bounds.rounding",
        "bounds.screening",
        "bounds.pruning",
        "bounds.descent",
        "bounds.alpha",
        "bounds.slopes",
        "bounds.problem",
        "bounds.branching",
        "bounds.piecewise",
        "bounds.silence",
        "bounds.exact",
    ],
    [
        "bounds.methods",
        "bounds.decision",
        "bounds.compiled",
        "bounds.cascade",
        "bounds.certificate",
        "bounds.certification",
        "bounds",
    ],
    ["attacks", "metrics", "callbacks"],
    ["defenses", "datasets"],
    ["distribution", "training", "evaluation", "serving", "tuning", "sklearn"],
    ["reproduction"],
    ["cli"],
]

# Only these may ask for a guess: everything else in bounds/ is for proofs.
MAY_GUESS = {"bounds.alpha", "bounds.decision", "defenses.rub_model"}

# A name of another that begins with an underscore: that of a named tuple, which
# is public. Keras's private names stand in `keras_internals` only, as words.
KNOWN = {"_replace"}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}


def run_time_nodes(tree):
    """All nodes but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from run_time_nodes(node)


def imports_of(tree):
    """Modules of this package that a module imports, with the names taken."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("keras_rub."):
                    yield alias.name.removeprefix("keras_rub."), alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[0] != "keras_rub":
                continue
            origin = node.module.removeprefix("keras_rub").lstrip(".")
            for alias in node.names:
                inner = f"{origin}.{alias.name}".lstrip(".")
                yield (inner if inner in MODULES else origin), alias.name


def floor_of(name):
    for level, prefixes in enumerate(FLOORS):
        if any(name == p or name.startswith(f"{p}.") for p in prefixes):
            return level
    return None


def test_every_module_has_a_floor():
    homeless = [name for name in MODULES if name and floor_of(name) is None]
    assert not homeless


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_no_arrow_points_upward(name):
    # The package itself may be read for its version and public names by
    # what stands above all of it.
    for target, _ in imports_of(MODULES[name]):
        allowed = len(FLOORS) - 2 if target == "" else floor_of(target)
        assert allowed <= floor_of(name), f"{name} imports {target}"


def test_no_import_cycle():
    edges = {
        name: {target for target, _ in imports_of(tree) if target != name}
        for name, tree in MODULES.items()
    }
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        path.append(name)
        for target in sorted(edges.get(name, ())):
            visit(target)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


def test_proofs_rest_on_no_guess():
    readers = {
        name
        for name, tree in MODULES.items()
        if any(target == "bounds.screening" for target, _ in imports_of(tree))
    }
    assert readers == MAY_GUESS


@pytest.mark.parametrize("name", MODULES)
def test_private_names_stay_in_their_module(name):
    tree = MODULES[name]
    for target, taken in imports_of(tree):
        assert not taken.startswith("_") or taken.startswith("__"), (
            f"{name} takes {taken} from {target}"
        )
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    } | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in (
            "self",
            "cls",
        ):
            continue
        if node.attr.startswith("_"):
            assert node.attr in own | KNOWN, f"{name}: {ast.unparse(node)}"


def test_import_does_without_what_is_used_seldom():
    """In a fresh interpreter where those packages can't be imported.

    Keras and TensorFlow import some of them by themselves.
    """
    code = (
        "import sys, keras, tensorflow\n"
        "for name in ('foolbox', 'sklearn', 'matplotlib', 'requests',\n"
        "             'tensorflow_datasets', 'keras_tuner', 'yaml',\n"
        "             'distributed'):\n"
        "    sys.modules[name] = None\n"
        "import keras_rub\n"
        "print(keras_rub.RUBModel.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("RUBModel")
