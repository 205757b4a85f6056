r"""Lists, verifies and extends the zoo, a folder of trained networks.

    keras-rub zoo
    keras-rub zoo --verify --data_dir DATA
    keras-rub zoo --leaderboard docs/leaderboard.md
    keras-rub zoo --add mnist-l1-2.8 --model out/mnist/model.keras \
        --radii 0.28,2.8

--verify loads every network, checks its checksum and attacker, recomputes how
many test samples are right and certified, and compares with the index; it fails
if a figure differs. A network without its data is not checked, and is counted
as such. --add measures a network that `keras-rub train` trained, keeps it
without the state of its optimizer, and writes the index and the page; a network
of that name is replaced. An interrupted --add goes on where it stopped.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import keras

import keras_rub
from keras_rub import datasets, tables, training, zoo
from keras_rub.bounds import methods
from keras_rub.cli import command, leaderboard, saved_run, shared, train
from keras_rub.cli.parsing import parse_radii
from keras_rub.files import (
    digest,
    replacing,
    write_atomically,
    write_figure,
)
from keras_rub.progress import Progress
from keras_rub.resuming import Parts

FLAGS = command.Flags()

_FOLDER = FLAGS.string(
    "folder",
    None,
    "The zoo; the environment variable KERAS_RUB_ZOO by default, else the "
    "folder zoo of a clone.",
)
_VERIFY = FLAGS.switch("verify", False, "Recompute the figures of the index.")
_NAMES = FLAGS.words("names", "", "With --verify: these networks only.")
_ATTACKED = FLAGS.switch(
    "attacked", False, "With --verify: the figures under attack too; slower."
)
_TOLERANCE = FLAGS.number(
    "tolerance",
    0.001,
    "With --verify: part of the samples by which a figure may differ, since "
    "other processors round otherwise; rounded down to whole samples.",
    lowest=0,
    highest=1,
)
_DATA_DIR = FLAGS.string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_ADD = FLAGS.string("add", None, "Add a network by this name.")
_MODEL = FLAGS.string(
    "model", None, "With --add: model.keras, with config.json beside it."
)
_RADII = FLAGS.string(
    "radii", None, "With --add: radii, with commas; by default the trained one."
)
_INPUT_RANGE = shared.define_range(FLAGS)
_METHOD = FLAGS.choice(
    "method", "auto", methods.names(), "With --add: how to certify."
)
_SAMPLES = FLAGS.whole(
    "samples",
    None,
    "With --add: test samples to certify, from the first; all by default.",
    lowest=1,
)
_ATTACKS = shared.define_attacks(FLAGS, "strong")
_ATTACK_SAMPLES = FLAGS.whole(
    "attack_samples",
    1000,
    "With --add: test samples to attack, from the first.",
    lowest=1,
)
_RECIPE_ONLY = FLAGS.switch(
    "recipe_only", False, "With --add: keep figures and recipe, but no file."
)
_PAGE = FLAGS.string(
    "page",
    "docs/zoo.md",
    "The page about the zoo; both pages are written by --add, and where one "
    "of their flags is given.",
)
_LEADERBOARD = FLAGS.string(
    "leaderboard",
    "docs/leaderboard.md",
    "The page on certified L1 accuracy, whose picture goes to the folder "
    "images beside it.",
)

_CHUNK = 256  # samples between two savings; whole batches of `certify`
_SEED = 0  # of attacks


def run() -> None:
    """Does what the flags say."""
    if _ADD.value is not None and _VERIFY.value:
        raise ValueError("--add and --verify are two tasks. Give one of them.")
    if _ADD.value is not None:
        _add(_ADD.value)
    elif _VERIFY.value:
        _verify(zoo.find_folder(_FOLDER.value))
    else:
        index = zoo.read_index(zoo.find_folder(_FOLDER.value))
        if _PAGE.present or _LEADERBOARD.present:
            _write_pages(index)
        else:
            print(tables.to_text(*_networks(index), range(5)))
            print(f"\n{tables.to_text(*_figures(index), range(2))}")


# What is measured -------------------------------------------------------------


def _jobs(model, x, y, entry, certify=True, attack=True):
    """From the name of each part to what counts its samples."""
    radii = [float(radius) for radius in entry["radii"]]
    attacker = keras_rub.PerturbationSet.from_config(entry["attacker"])

    def certified(first, last):
        table = keras_rub.certify(
            model,
            x[first:last],
            y[first:last],
            rho=radii,
            method=entry["method"],
            decide_only=True,
            verbose=0,
            perturbations=attacker,
        )
        return {
            "samples": last - first,
            "clean": int((table[0].predicted == table[0].labels).sum()),
            "certified": [int(found.certified.sum()) for found in table],
        }

    def attacked(first, last):
        keras.utils.set_random_seed(_SEED)  # foolbox takes no seed
        found = keras_rub.evaluate(
            model,
            x[first:last],
            y[first:last],
            radii=radii,
            norms=[attacker.norm],
            attacks=entry["attacks"],
            certificates=False,
            examples=0,
            diagnosis=False,
            seed=_SEED,
            verbose=0,
            perturbations=attacker,
        )
        standing = found.worst(attacker.norm).sum(axis=1)
        return {"samples": last - first, "attacked": standing.tolist()}

    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, work, count in (
        ("certify", certified, entry["samples"] if certify else 0),
        ("attack", attacked, entry["attack_samples"] if attack else 0),
    ):
        for first in range(0, count, _CHUNK):
            last = min(first + _CHUNK, count)
            jobs[f"{name}:{first}"] = functools.partial(work, first, last)
    return jobs


def _add_up(parts, entry):
    """The figures of all parts, each a count and a percent."""
    found: dict[str, Any] = {}
    for kind, samples in (
        ("clean", entry["samples"]),
        ("certified", entry["samples"]),
        ("attacked", entry["attack_samples"]),
    ):
        counts = [part[kind] for part in parts if kind in part]
        if kind == "clean" and counts:
            found[kind] = _figure(sum(counts), samples)
        elif counts:
            sums = map(sum, zip(*counts, strict=True))
            found[kind] = {
                radius: _figure(count, samples)
                for radius, count in zip(entry["radii"], sums, strict=True)
            }
    return found


def _figure(count, samples):
    return {"count": count, "percent": round(100 * count / samples, 2)}


def _load_data(settings):
    """The data set in the units of the training."""
    return datasets.load(
        settings["dataset"],
        _DATA_DIR.value,
        normalization=settings["normalization"],
        label=settings.get("label"),
    )


# --add ------------------------------------------------------------------------


def _add(name):
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(
            "--add must be a name of small letters, digits, dots, dashes and "
            f"underscores, such as mnist-l1-2.8. Received: {name}"
        )
    shared.attack_names(_ATTACKS.value)
    folder = zoo.find_folder(_FOLDER.value)
    index = zoo.read_index(folder) if zoo.has_index(folder) else {}
    saved = saved_run.SavedRun.load(_MODEL.value)
    settings = _settings_of(saved)
    data = _load_data(settings)
    attacker = shared.attackers(saved, None, _INPUT_RANGE.value, data)[0]
    model = _bare(saved.model, settings, attacker)
    if not _RECIPE_ONLY.value:
        _check_room(name, index, model)
    radii = [settings["rho"]]
    if _RADII.value is not None:
        radii = parse_radii(_RADII.value, "radii", [attacker.norm])[
            attacker.norm
        ]
    x, y = data.test
    x = saved.inputs(x)
    samples = min(_SAMPLES.value or len(x), len(x))
    attacks = _attacks(model, attacker)
    entry = {
        "file": None,
        "sha256": None,
        "network": _network(model, settings["architecture"]),
        "parameters": model.count_params(),
        "units": data.units,
        "training": settings,
        "recipe": train.line_of(settings, f"out/{name}"),
        "attacker": attacker.get_config(),
        "radii": [f"{rho:g}" for rho in radii],
        "method": _METHOD.value,
        "samples": samples,
        "attacks": attacks,
        "attack_samples": min(_ATTACK_SAMPLES.value, samples) if attacks else 0,
    }
    print(shared.header(data, [attacker]), flush=True)
    parts = Parts(
        pathlib.Path(_MODEL.value).with_suffix(".zoo.json"),
        {**entry, "name": name, "model_sha256": digest(_MODEL.value)},
        "--model, or delete it",
    )
    parts.work_off(_jobs(model, x, y, entry))
    entry.update(_add_up(parts.done.values(), entry))
    old = index.get(name, {}).get("file")
    if _RECIPE_ONLY.value:
        if old:
            (folder / old).unlink(missing_ok=True)
    else:
        path = folder / f"{name}.keras"
        _save(model, path)
        entry.update(file=path.name, sha256=digest(path))
    # Others may have added theirs in the meantime.
    index = zoo.read_index(folder) if zoo.has_index(folder) else {}
    index = dict(sorted({**index, name: entry}.items()))
    zoo.write_index(folder, index)
    parts.remove()
    print(f"\n{tables.to_text(*_figures({name: entry}), range(2))}")
    print(f"\nwritten to {folder}")
    _write_pages(index)


def _write_pages(index):
    write_atomically(_PAGE.value, page(index))
    path = pathlib.Path(_LEADERBOARD.value)
    picture = path.parent / "images" / "leaderboard.png"
    write_figure(leaderboard.figure(index), picture)
    write_atomically(path, leaderboard.page(index))
    print(f"written to {_PAGE.value} and {path}")


def _settings_of(saved):
    """What decided the training, without what else is beside the model."""
    recipe = training.Recipe().to_dict()
    known = {**training.ADDED, **saved.settings}
    if set(recipe) - set(known) or not pathlib.Path(saved.path).is_file():
        raise ValueError(
            f"--model must be a .keras file of keras-rub train, with its "
            f"config.json beside it. Received: {saved.path}"
        )
    if "table" in known or known["dataset"] not in datasets.names(
        _DATA_DIR.value
    ):
        raise ValueError(
            "--add takes networks for the data sets of keras_rub.datasets."
            f"names(), which others have too. Received: {known['dataset']}"
        )
    kept = ("dataset", "normalization", "label", *recipe)
    return {key: known[key] for key in kept if key in known}


def _bare(model, settings, attacker):
    """The same network with this attacker, and nothing of its training."""
    bare = type(model).from_config(model.get_config())
    bare.set_weights(model.get_weights())
    if not hasattr(bare, "perturbations"):
        return bare
    bare.rho = settings["rho"]  # in place of its ramp
    bare.perturbations = attacker
    kept = type(bare).from_config(bare.get_config()).perturbations
    if kept.key != attacker.key:
        raise ValueError(
            f"A {type(bare).__name__} keeps no valid range, so that the "
            "figures would not be those of the file. Leave --input_range out."
        )
    return bare


# Arguments of layers and initializers that Keras 3.10, the oldest release that
# setup.py allows, does not know. None is what it does without them.
_NEW_ARGUMENTS = ("quantization_config", "input_axes", "output_axes")


def _save(model, path):
    """Saves a model at once, so that older releases of Keras read it too."""

    def known(config):
        return {
            key: value
            for key, value in config.items()
            if value is not None or key not in _NEW_ARGUMENTS
        }

    with replacing(path) as partial:
        model.save(partial)
        with zipfile.ZipFile(partial) as file:
            parts = {name: file.read(name) for name in file.namelist()}
        config = json.loads(parts["config.json"], object_hook=known)
        parts["config.json"] = json.dumps(config).encode()
        with zipfile.ZipFile(partial, "w") as file:
            for name, content in parts.items():
                file.writestr(name, content)


def _check_room(name, index, model):
    """Raises if the zoo would get too large, before the long work."""
    files = {key for key, entry in index.items() if entry["file"]}
    if len(files | {name}) > zoo.MOST_FILES:
        raise ValueError(
            f"The zoo holds {len(files)} files, and no more than "
            f"{zoo.MOST_FILES} are allowed: give --recipe_only."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{name}.keras"
        _save(model, path)
        size = path.stat().st_size
    if size >= zoo.MOST_BYTES:
        raise ValueError(
            f"The file would have {size / 1e6:.2f} MB, and must be below "
            f"{zoo.MOST_BYTES / 1e6:g}: give --recipe_only."
        )


def _attacks(model, attacker):
    """The names of the attacks that are run."""
    asked = shared.attack_names(_ATTACKS.value)
    suite = keras_rub.attacks.Suite(
        model, attacks=asked, perturbations=attacker
    )
    return list(suite.attacks)


def _network(model, architecture):
    """The network in a few words: its widths, where it has no others."""
    base = getattr(model, "base", model)
    layers = [layer for layer in base.layers if layer.weights]
    if all(isinstance(layer, keras.layers.Dense) for layer in layers):
        widths = [layers[0].kernel.shape[0], *(la.units for la in layers)]
        return f"{architecture}, {'-'.join(map(str, widths))}"
    return architecture


# --verify ---------------------------------------------------------------------

_VERIFIED = (
    "name", "figure", "radius", "samples", "stated", "found", "seconds", "",
)  # fmt: skip


def _verify(folder):
    index = zoo.read_index(folder)
    names = _NAMES.value or sorted(index)
    for name in names:
        zoo.find_entry(folder, name)
    rows, notes = [], []
    for number, name in enumerate(names, start=1):
        print(f"{name}, {number} of {len(names)}", flush=True)
        found, note = _verify_one(folder, name, index[name])
        rows += found
        notes += [f"{name}: {note}"] if note else []
    print(f"\n{tables.to_text(_VERIFIED, rows, left=(0, 1, 7))}\n")
    for note in notes:
        print(note)
    wrong = sum(row[-1] in ("DIFFERS", "DAMAGED") for row in rows)
    unchecked = sum(row[-1].startswith("not checked") for row in rows)
    checked = len(rows) - unchecked
    print(
        f"{checked - wrong} of {checked} figures agree; {unchecked} of "
        f"{len(names)} networks not checked"
    )
    if wrong:
        raise ValueError(f"{wrong} of {checked} figures differ.")
    if not checked:
        raise ValueError("Nothing was checked.")


def _verify_one(folder, name, entry):
    """The rows of one network, and what else there is to say."""

    def single(result):
        return [name, *[""] * 6, result]

    if entry["file"] is None:
        return [single("not checked: recipe only")], None
    start = time.monotonic()
    try:
        model = keras_rub.models.load(name, folder)
    except ValueError as error:
        return [single("DAMAGED")], str(error)
    try:
        data = _load_data(entry["training"])
    except ValueError as error:
        return [single("not checked: no data")], str(error)
    own = getattr(model, "perturbations", None)
    stated = keras_rub.PerturbationSet.from_config(entry["attacker"])
    if own is not None and own.key != stated.key:
        return [single("DIFFERS")], f"its attacker is {own}, not {stated}"
    x, y = data.test
    if len(x) < entry["samples"]:
        return [single("DIFFERS")], f"the data has {len(x)} test samples"
    x = saved_run.SavedRun(name, model, {}, own).inputs(x)
    attack = _ATTACKED.value and bool(entry["attacks"])
    jobs = _jobs(model, x, y, entry, attack=attack)
    total = entry["samples"] + (entry["attack_samples"] if attack else 0)
    progress = Progress(total)
    parts = []
    for job in jobs.values():
        parts.append(job())
        progress.update(sum(part["samples"] for part in parts))
    found = _add_up(parts, entry)
    rows = [
        _compare(name, entry, found, kind, radius)
        for kind in found
        for radius in ([None] if kind == "clean" else entry["radii"])
    ]
    rows[0][6] = f"{time.monotonic() - start:.1f}"  # of the whole network
    return rows, None


def _compare(name, entry, found, kind, radius):
    """One row: a figure of the index beside what was found."""
    stated, count = (
        figures[kind]["count"]
        if radius is None
        else figures[kind][radius]["count"]
        for figures in (entry, found)
    )
    samples = entry["attack_samples" if kind == "attacked" else "samples"]
    allowed = int(_TOLERANCE.value * samples)
    result = "ok" if stated == count else f"ok, within {allowed}"
    if abs(stated - count) > allowed:
        result = "DIFFERS"
    return [name, kind, radius or "", samples, stated, count, "", result]


# The index for readers --------------------------------------------------------


def _networks(index) -> tuple[list[Any], list[list[Any]]]:
    """A row a network: what it is."""
    header = [
        "name", "data", "network", "trained by", "attacker", "parameters",
    ]  # fmt: skip
    rows = []
    for name, entry in index.items():
        made = entry["training"]
        rows.append(
            [
                name,
                f"{made['dataset']}, {made['normalization']}",
                entry["network"],
                f"{made['defense']}, L{made['norm']}, {made['rho']:g}",
                keras_rub.PerturbationSet.from_config(entry["attacker"]),
                entry["parameters"],
            ]
        )
    return header, rows


def _figures(index) -> tuple[list[Any], list[list[Any]]]:
    """A row a network and radius: percents."""
    header = [
        "name", "method", "radius", "samples", "clean", "certified",
        "attacked", "of them",
    ]  # fmt: skip
    return header, [
        [
            name,
            entry["method"],
            radius,
            entry["samples"],
            _percent(entry["clean"]),
            _percent(entry["certified"][radius]),
            _percent(entry.get("attacked", {}).get(radius)),
            entry["attack_samples"] or "",
        ]
        for name, entry in index.items()
        for radius in entry["radii"]
    ]


def _percent(figure):
    return "" if figure is None else f"{figure['percent']:.2f}%"


def page(index: dict[str, dict[str, Any]]) -> str:
    """The page about the zoo, in Markdown."""
    units = "\n".join(
        f"- `{name}`: {entry['units']}" for name, entry in index.items()
    )
    recipes = "\n".join(entry["recipe"] for entry in index.values())
    without = [f"`{name}`" for name in index if not index[name]["file"]]
    only = f"Without a file, by recipe only: {', '.join(without)}."
    used = dict.fromkeys(
        attack for entry in index.values() for attack in entry["attacks"]
    )
    return f"""# Zoo

Trained networks with their figures, so that claims can be checked in minutes,
without training. They are in the folder `zoo` of the repository, at most
{zoo.MOST_FILES} files below {zoo.MOST_BYTES / 1e6:g} MB each, and not in the
wheel: elsewhere, set `{zoo.ENVIRONMENT_VARIABLE}` to that folder of a clone.
This page is made of `zoo/index.json` by `keras-rub zoo --page docs/zoo.md`.

```python
import keras_rub

model = keras_rub.models.load("{min(index)}")
facts = keras_rub.models.facts("{min(index)}")
```

`model` is the robust model with the attacker that its figures speak of, so that
`keras_rub.certify(model, x, y, rho=...)` gives them; `model.base` is the plain
network. The file is checked against the sha256 of the index.

## Networks

{tables.to_markdown(*_networks(index))}

{only if without else "Each has a file."} "Trained by" is the defence, the norm
and the radius of the training, "attacker" whom the figures speak of. A radius
is in units of:

{units}

## Figures

{tables.to_markdown(*_figures(index))}

Percents of the first samples of the test set: classified right (clean),
certified within the radius by the method, and right under every attack, of the
number of samples in the last column. The attacks: {", ".join(used) or "none"}.

## Verify

```sh
make verify-zoo
make verify-zoo FLAGS="--attacked --data_dir DATA"
```

checks every file, recomputes clean and certified counts from it and compares
them with the index; a difference is an error. Embedded data sets need nothing;
the others come from `--data_dir`, else `KERAS_RUB_DATA`, else from the network.
A network without its data is listed and counted as not checked. With
`--attacked` the figures under attack are recomputed too.

A count may differ by a thousandth of the samples, rounded down: a bound that is
0 up to rounding in float32 falls on either side on another processor. On both
sides what counts as certified is proved, by the allowance of
[certificates](certificates.md#rounding). So fewer than 1000 samples have to
agree exactly; `--tolerance 0` asks that of all.

## Recipes

Another processor rounds otherwise and arrives at slightly other weights:
recipes give networks like these, only the files give these.

```sh
{recipes}
```

## Add a network

Train it with `keras-rub train`; then, in a clone:

```sh
keras-rub zoo --add mnist-l1-2.8 --model out/mnist-l1-2.8/model.keras \\
    --radii 0.28,2.8
```

Data set, units and recipe are read from config.json beside the model, the
attacker from the model; `--input_range data` gives it the range of the data
too. The state of the optimizer is left out. `--recipe_only` is for networks
that are too large.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("zoo", FLAGS, run, argv, about=__doc__)
