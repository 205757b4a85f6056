"""Searches hyper-parameters: many trainings, scored under attack.

    python tools/tune.py --dataset digits
    python tools/tune.py --dataset cifar10 --max_trials 40 --steps 2000

Every trial is scored for all radii, so that one sweep yields the best settings
for each of them, as the paper selects them. Writes to --out: results.csv (one
row a trial, criterion and radius), the networks, the best one for each
criterion, tables.md and a plot. When the same command is given again it goes
on where it stopped; --report only prints what there is.

On many machines, with a folder that all share: start one chief and any number
of workers with the same flags and, in the environment,
KERASTUNER_TUNER_ID=chief (worker0, worker1, ...), KERASTUNER_ORACLE_IP and
KERASTUNER_ORACLE_PORT of the chief. A worker that dies loses its trial to
another one. The chief prints the report.
"""

import os
import pathlib

from absl import app, flags
from matplotlib.figure import Figure

import keras_rub
from keras_rub import datasets
from keras_rub.attacks.suite import names_of
from keras_rub.files import write_atomically, write_figure
from keras_rub.perturbations import canonical_norm
from keras_rub.tuning import SearchSpace, Sweep
from keras_rub.tuning.oracles import ORACLES

_DATASET = flags.DEFINE_string(
    "dataset", "digits", "Name of the data set, or a .csv or .npz file."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files; the environment variable KERAS_RUB_DATA by "
    "default.",
)
_SPACE = flags.DEFINE_string(
    "space",
    None,
    "YAML or JSON file with the search space; by default a small one, or with "
    "--paper that of the paper.",
)
_PAPER = flags.DEFINE_bool("paper", False, "Search the paper's whole grid.")
_ORACLE = flags.DEFINE_enum(
    "oracle", "random", list(ORACLES), "How the next trial is chosen."
)
_RADII = flags.DEFINE_string(
    "radii",
    None,
    "Radii of the attacks, such as '1:0.5,1;inf:0.05,0.1'; by default 0.01, "
    "0.05 and 0.1 for Linf, ten times that for L2, and for L1 times the square "
    "root of the number of features.",
)
_OBJECTIVE = flags.DEFINE_string(
    "objective",
    "mean",
    "What the oracle maximises: mean, attacked:NORM:RADIUS or "
    "certified:NORM:RADIUS.",
)
_ATTACKS = flags.DEFINE_list("attacks", ["pgd"], "Attacks, with commas.")
_CERTIFICATES = flags.DEFINE_enum(
    "certificates",
    "rub",
    ["none", "auto", "rub", "alpha-rub", "crown", "coap"],
    "How to certify each network.",
)
_MAX_TRIALS = flags.DEFINE_integer(
    "max_trials", 12, "Trials in all, earlier ones included.", lower_bound=1
)
_MAX_MINUTES = flags.DEFINE_float(
    "max_minutes", None, "After so long no new trial is begun."
)
_STEPS = flags.DEFINE_integer(
    "steps", 300, "Training steps of a trial.", lower_bound=1
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 300, "Validation and test samples to score.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of training and search.")
_WORKER_TIMEOUT = flags.DEFINE_float(
    "worker_timeout", 60.0, "Seconds after which a silent worker is given up."
)
_REPORT = flags.DEFINE_bool("report", False, "Only print the results so far.")
_OUT = flags.DEFINE_string(
    "out", None, "Folder for the results; out/tune/DATASET by default."
)

_SMALL_SPACE = SearchSpace(
    defense=("nominal", "pgd-inf", "arub-inf", "arub-1", "rub"),
    rho=(0.01, 0.05, 0.1),
    learning_rate=(1e-2, 1e-3),
    batch_size=(32, 256),
)


def search_space() -> SearchSpace:
    """The space asked for."""
    if _SPACE.value:
        return SearchSpace.read(_SPACE.value)
    return SearchSpace() if _PAPER.value else _SMALL_SPACE


def radii_of(shape) -> dict:
    """The radii asked for, by norm."""
    if _RADII.value is None:
        numbers = (0.01, 0.05, 0.1)
        return {
            1: [round(keras_rub.paper_radius(n, 1, shape), 4) for n in numbers],
            2: [10 * number for number in numbers],
            "inf": list(numbers),
        }
    try:
        pairs = [part.split(":") for part in _RADII.value.split(";")]
        return {
            canonical_norm(norm.strip()): [float(r) for r in radii.split(",")]
            for norm, radii in pairs
        }
    except ValueError as error:
        raise ValueError(
            "--radii must look like '1:0.5,1;inf:0.05'. "
            f"Received: {_RADII.value} ({error})"
        ) from None


def draw(sweep: Sweep, path: pathlib.Path) -> None:
    """Test accuracy over the radius for each defence, a panel for a norm."""
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


def report(sweep: Sweep, folder: pathlib.Path) -> None:
    """Prints the leaderboard and tables, and writes them."""
    if not sweep.results.read():
        print(f"no results in {folder} yet")
        return
    print("\n" + sweep.results.leaderboard())
    tables = sweep.results.tables()
    print("\nTest accuracy, settings chosen on the validation set\n\n" + tables)
    write_atomically(folder / "tables.md", tables + "\n")
    draw(sweep, folder / "accuracy.png")
    count = len(sweep.export_best())
    print(f"\n{count} best networks in {folder / 'best'}")


def main(argv):
    del argv
    name = pathlib.Path(_DATASET.value).stem
    folder = pathlib.Path(_OUT.value or f"out/tune/{name}")
    try:
        data = datasets.load(_DATASET.value, _DATA_DIR.value)
        sweep = Sweep(
            dataset=_DATASET.value,
            data_dir=_DATA_DIR.value,
            space=search_space(),
            radii=radii_of(data.input_shape),
            folder=folder,
            oracle=_ORACLE.value,
            objective=_OBJECTIVE.value,
            steps=_STEPS.value,
            attacks=names_of(_ATTACKS.value),
            certificates=(
                None if _CERTIFICATES.value == "none" else _CERTIFICATES.value
            ),
            samples=_SAMPLES.value,
            seed=_SEED.value,
        )
        if not _REPORT.value:
            print(f"radius in units of: {data.units}", flush=True)
            sweep.search(
                _MAX_TRIALS.value, _MAX_MINUTES.value, _WORKER_TIMEOUT.value
            )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    if os.environ.get("KERASTUNER_TUNER_ID", "chief") == "chief":
        report(sweep, folder)


if __name__ == "__main__":
    app.run(main)
