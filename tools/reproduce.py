"""Reproduces the tables and figures of the paper.

    python tools/reproduce.py --what fig_ranks --budget laptop --data_dir DATA

Each name writes a page (Markdown, CSV and PNG) with the paper's figures beside
ours. The work is cut into small jobs whose results are kept: the same command
again goes on where the last one was stopped, in whatever way. `--what all`
makes every page, `--budget smoke` in a minute or two on embedded data.
"""

import pathlib
import sys
import warnings

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from reproduction import pages_losses, pages_uci, pages_vision, summary
from reproduction.budgets import BUDGETS
from reproduction.context import Context

EXPERIMENTS = {
    "fig_loss": pages_losses.fig_loss,
    "tab_upper_bound": pages_losses.tab_upper_bound,
    "fig_ranks": pages_uci.fig_ranks,
    "fig_improvement": pages_uci.fig_improvement,
    "tab_speed": pages_losses.tab_speed,
    "tab_fashion": pages_vision.attacked("fashion_mnist", cnn=False),
    "tab_mnist": pages_vision.attacked("mnist", cnn=False),
    "tab_cifar": pages_vision.attacked("cifar10", cnn=False),
    "tab_bounds_fashion": pages_vision.bounds("fashion_mnist"),
    "tab_bounds_mnist": pages_vision.bounds("mnist"),
    "tab_bounds_cifar": pages_vision.bounds("cifar10"),
    "tab_cnn_fashion": pages_vision.attacked("fashion_mnist", cnn=True),
    "tab_cnn_mnist": pages_vision.attacked("mnist", cnn=True),
    "tab_cnn_cifar": pages_vision.attacked("cifar10", cnn=True),
    "summary": summary.summary,
}

_WHAT = flags.DEFINE_list(
    "what", [], f"all, or names with commas: {', '.join(EXPERIMENTS)}."
)
_BUDGET = flags.DEFINE_enum(
    "budget",
    "smoke",
    list(BUDGETS),
    "smoke: tiny, on embedded data. laptop: hours on 2 cores. full: the "
    "paper's grid.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with NAME.npz files and uci/; the environment variable "
    "KERAS_RUB_DATA by default.",
)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder for models and job results; out/reproduce by default, with the "
    "budget's name behind it unless that is laptop.",
)
_RESULTS = flags.DEFINE_string(
    "results",
    None,
    "Folder for the pages; docs/results by default, for smoke OUT/results.",
)
_MINUTES = flags.DEFINE_float(
    "minutes",
    None,
    "Start no job after so many minutes of a group of jobs, and make the "
    "pages of what is finished; 0 for the pages alone.",
    lower_bound=0.0,
)
_TRAIN = flags.DEFINE_bool(
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
        command="python tools/reproduce.py --what {name} --budget " + budget,
        minutes=_MINUTES.value,
        train=_TRAIN.value,
    )


def main(argv):
    del argv
    names = list(EXPERIMENTS) if _WHAT.value == ["all"] else _WHAT.value
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        raise app.UsageError(
            f"--what must be all or some of {', '.join(EXPERIMENTS)}. "
            f"Received: {','.join(unknown) or 'nothing'}"
        )
    # Keras warns of a shuffled tf.data.Dataset whenever one is trained on.
    warnings.filterwarnings("ignore", message=".*shuffle=True.*")
    context = make_context()
    for name in names:
        print(f"{name}:", flush=True)
        EXPERIMENTS[name](context)


if __name__ == "__main__":
    app.run(main)
