r"""Searches hyper-parameters: many trainings, scored under attack.

    keras-rub tune --dataset digits
    keras-rub tune --dataset cifar10 --max_trials 40 --steps 2000

Every trial is scored for all radii, so that one sweep yields the best settings
for each of them, as the paper selects them. Writes to --out: results.csv (one
row a trial, criterion and radius), the networks, the best one for each
criterion, tables.md and a plot. When the same command is given again it goes
on where it stopped; --report_only prints what there is.

On many machines, with a folder that all share: start one chief and any number
of workers with the same flags and, in the environment,
KERASTUNER_TUNER_ID=chief (worker0, worker1, ...), KERASTUNER_ORACLE_IP and
KERASTUNER_ORACLE_PORT of the chief. A worker that dies loses its trial to
another one. The chief prints the report.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import keras_rub
from keras_rub.attacks.suite import names_of
from keras_rub.cli import command, shared
from keras_rub.cli.parsing import parse_radii
from keras_rub.files import write_atomically, write_figure
from keras_rub.tuning import SearchSpace, Sweep
from keras_rub.tuning.oracles import ORACLES

FLAGS = command.Flags()

_DATA = shared.DataFlags(FLAGS, trained=False, tables=False)
_SPACE = FLAGS.string(
    "space",
    None,
    "YAML or JSON file with the search space; by default a small one, or with "
    "--paper that of the paper. --normalization replaces that of the space.",
)
_PAPER = FLAGS.switch("paper", False, "Search the paper's whole grid.")
_ORACLE = FLAGS.choice(
    "oracle", "random", ORACLES, "How the next trial is chosen."
)
_RADII = FLAGS.string(
    "radii",
    None,
    "Radii of the attacks for each norm, such as 1:0.5,1;inf:0.05,0.1; by "
    "default 0.01, 0.05 and 0.1 for Linf, ten times that for L2, and for L1 "
    "times the square root of the number of features.",
)
_OBJECTIVE = FLAGS.string(
    "objective",
    "mean",
    "What the oracle maximises: mean, attacked:NORM:RADIUS or "
    "certified:NORM:RADIUS.",
)
_ATTACKS = shared.define_attacks(FLAGS, "pgd")
_CERTIFICATES = shared.define_certificates(FLAGS, "fast")
_MAX_TRIALS = FLAGS.whole(
    "max_trials", 12, "Trials in all, earlier ones included.", lowest=1
)
_MAX_MINUTES = FLAGS.number(
    "max_minutes", None, "After so long no new trial is begun.", lowest=0
)
_STEPS = FLAGS.whole("steps", 300, "Training steps of a trial.", lowest=1)
_SAMPLES = shared.define_samples(FLAGS, 300, "validation and test")
_SEED = shared.define_seed(FLAGS, "training and search")
_WORKER_TIMEOUT = FLAGS.number(
    "worker_timeout",
    60.0,
    "Seconds after which a silent worker is given up.",
    lowest=0,
)
_REPORT_ONLY = FLAGS.switch(
    "report_only", False, "Only print the results so far."
)
_OUT = shared.define_out(
    FLAGS, None, "Folder for the results; out/tune/DATASET by default."
)

_SMALL_SPACE = SearchSpace(
    defense=("nominal", "pgd-inf", "arub-inf", "arub-1", "rub"),
    rho=(0.01, 0.05, 0.1),
    learning_rate=(1e-2, 1e-3),
    batch_size=(32, 256),
)


def run() -> None:
    """Searches as the flags say."""
    space = _space()
    data = _DATA.load()
    if data.schema is not None and data.schema.has_categories:
        raise ValueError(
            "tune compares norms, and categories know prices only: train "
            f"instead, at several radii. Received: {data.name} with the "
            f"categories or steps {data.schema.names_of('category', 'ordinal')}"
        )
    folder = pathlib.Path(
        _OUT.value or f"out/tune/{pathlib.Path(data.name).stem}"
    )
    sweep = Sweep(
        dataset=data.name,
        data_dir=_DATA.data_dir,
        label=_DATA.label,
        space=space,
        radii=_radii(data.input_shape),
        folder=folder,
        oracle=_ORACLE.value,
        objective=_OBJECTIVE.value,
        steps=_STEPS.value,
        attacks=names_of(shared.attack_names(_ATTACKS.value)),
        certificates=(
            None if _CERTIFICATES.value == "none" else _CERTIFICATES.value
        ),
        samples=_SAMPLES.value,
        seed=_SEED.value,
    )
    if not _REPORT_ONLY.value:
        print(f"radius in units of: {data.units}", flush=True)
        sweep.search(
            _MAX_TRIALS.value, _MAX_MINUTES.value, _WORKER_TIMEOUT.value
        )
    if os.environ.get("KERASTUNER_TUNER_ID", "chief") == "chief":
        _report(sweep, folder)


def _space() -> SearchSpace:
    """The space asked for."""
    if _SPACE.value:
        space = SearchSpace.read(_SPACE.value)
    else:
        space = SearchSpace() if _PAPER.value else _SMALL_SPACE
    if _DATA.normalization:
        space = dataclasses.replace(space, normalization=(_DATA.normalization,))
    return space


def _radii(shape) -> dict:
    """The radii asked for, by norm."""
    if _RADII.value is not None:
        return parse_radii(_RADII.value, "radii")
    numbers = (0.01, 0.05, 0.1)
    return {
        1: [round(keras_rub.paper_radius(n, 1, shape), 4) for n in numbers],
        2: [10 * number for number in numbers],
        "inf": list(numbers),
    }


def _report(sweep: Sweep, folder: pathlib.Path) -> None:
    """Prints the leaderboard and tables, and writes them."""
    if not sweep.results.read():
        print(f"no results in {folder} yet")
        return
    print("\n" + sweep.results.leaderboard())
    tables = sweep.results.tables()
    print("\nTest accuracy, settings chosen on the validation set\n\n" + tables)
    write_atomically(folder / "tables.md", tables + "\n")
    _draw(sweep, folder / "accuracy.png")
    count = len(sweep.export_best())
    print(f"\n{count} best networks in {folder / 'best'}")


def _draw(sweep: Sweep, path: pathlib.Path) -> None:
    """Test accuracy over the radius for each defence, a panel for a norm."""
    from matplotlib.figure import Figure

    best = sweep.results.best(by_defense=True)
    kinds = list(dict.fromkeys(key[1:3] for key in best if key[2]))
    if not kinds:
        return
    figure = Figure(figsize=(4.4 * len(kinds), 3.6), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, (criterion, norm) in zip(panels, kinds, strict=True):
        for defense in dict.fromkeys(key[0] for key in best):
            points = sorted(
                (key[3], 100 * row["accuracy"])
                for key, row in best.items()
                if key[:3] == (defense, criterion, norm)
            )
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=defense)
        axes.set_title(f"{criterion}, L{norm}")
        axes.set_xlabel("radius, in the network's input units")
        axes.grid(alpha=0.3)
        axes.set_ylim(-2, 102)
    panels[0].set_ylabel("accuracy on the test set, %")
    panels[-1].legend(fontsize=8)
    write_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("tune", FLAGS, run, argv, about=__doc__)
