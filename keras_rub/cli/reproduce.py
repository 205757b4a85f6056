"""Reproduces the tables and figures of the paper.

    keras-rub reproduce --what fig_ranks --budget laptop --data_dir DATA

Each name writes a page (Markdown, CSV and PNG) with the paper's figures beside
ours. The work is cut into small jobs whose results are kept: the same command
again goes on where the last one was stopped, in whatever way. `--what all`
makes every page, `--budget smoke` in a minute or two on embedded data.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Sequence

from keras_rub.cli import command
from keras_rub.reproduction.budgets import BUDGETS
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.experiments import EXPERIMENTS, make

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


def make_context() -> Context:
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
    context = make_context()
    for name in names:
        make(name, context)


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    return command.call("reproduce", FLAGS, run, argv, about=__doc__)
