"""Reproduces the tables and figures of the paper.

    keras-rub reproduce --what fig_ranks --budget laptop --data_dir DATA

Each name writes a page (Markdown, CSV and PNG) with the paper's figures beside
ours. The work is cut into small jobs whose results are kept: the same command
again goes on where the last one was stopped, in whatever way. `--what all`
makes every page, `--budget smoke` in a minute or two on embedded data.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Sequence

from keras_rub.cli import command
from keras_rub.reproduction.budgets import BUDGETS
from keras_rub.reproduction.cluster import Cluster
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.experiments import EXPERIMENTS, make
from keras_rub.reproduction.jobs import Engine, Here

FLAGS = command.Flags()

_WHAT = FLAGS.words(
    "what", "", f"all, or names with commas: {', '.join(EXPERIMENTS)}."
)
_BUDGET = FLAGS.choice(
    "budget",
    "smoke",
    BUDGETS,
    "smoke: tiny, on embedded data. laptop: hours on 2 cores. full: the "
    "paper's grid.",
)
_DATA_DIR = FLAGS.string(
    "data_dir",
    None,
    "Folder with NAME.npz files and uci/; the environment variable "
    "KERAS_RUB_DATA by default.",
)
_OUT = FLAGS.string(
    "out",
    None,
    "Folder for models and job results; out/reproduce by default, with the "
    "budget's name behind it unless that is laptop.",
)
_RESULTS = FLAGS.string(
    "results",
    None,
    "Folder for the pages; docs/results by default, for smoke OUT/results.",
)
_MINUTES = FLAGS.number(
    "minutes",
    None,
    "Start no job after so many minutes of a group of jobs, and make the "
    "pages of what is finished; 0 for the pages alone.",
    lowest=0,
)
_TRAIN = FLAGS.switch(
    "train", True, "Train the image networks that are missing."
)
_PROCESSES = FLAGS.whole(
    "processes",
    None,
    "How many processes do jobs, each with one thread; 1 for this one alone. "
    "By default one a core, with smoke 1.",
    lowest=1,
)
_SCHEDULER = FLAGS.string(
    "scheduler",
    None,
    "Address of a Dask scheduler whose workers do the jobs instead, such as "
    "tcp://host:8786.",
)


def make_engine() -> Engine:
    """What does the jobs, as the flags say."""
    processes = _PROCESSES.value
    if _SCHEDULER.value is not None:
        if processes is not None:
            raise ValueError(
                "--scheduler brings its own workers: leave out --processes. "
                f"Received: --processes={processes}"
            )
        return Cluster(scheduler=_SCHEDULER.value)
    if processes is None:
        processes = 1 if _BUDGET.value == "smoke" else os.cpu_count() or 1
    return Here() if processes == 1 else Cluster(processes=processes)


def make_context(engine: Engine) -> Context:
    """Folders and budget as the flags say."""
    budget = _BUDGET.value
    out = _OUT.value
    if out is None:
        ending = "" if budget == "laptop" else f"-{budget}"
        out = f"out/reproduce{ending}"
    results = _RESULTS.value
    if results is None:
        results = f"{out}/results" if budget == "smoke" else "docs/results"
    return Context(
        budget=budget,
        data_dir=_DATA_DIR.value,
        out=pathlib.Path(out),
        results=pathlib.Path(results),
        minutes=_MINUTES.value,
        train=_TRAIN.value,
        engine=engine,
    )


def run() -> None:
    """Makes the pages that the flags name."""
    names = list(EXPERIMENTS) if _WHAT.value == ["all"] else _WHAT.value
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        raise ValueError(
            f"--what must be all or some of {', '.join(EXPERIMENTS)}. "
            f"Received: {','.join(unknown) or 'nothing'}"
        )
    # Keras warns of a shuffled tf.data.Dataset whenever one is trained on.
    warnings.filterwarnings("ignore", message=".*shuffle=True.*")
    with contextlib.closing(make_engine()) as engine:
        context = make_context(engine)
        for name in names:
            make(name, context)


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("reproduce", FLAGS, run, argv, about=__doc__)
