"""The console script `keras-rub`: finds the command and calls it."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from keras_rub.cli import command

# From the name of a command, which is that of its module, to what it does.
COMMANDS = {
    "train": "Train one network with one defence.",
    "certify": "Certify a trained network on a data set, at several radii.",
    "evaluate": "Attack and certify a trained network, and write a report.",
    "tune": "Search hyper-parameters: many trainings, scored under attack.",
    "export": "Export a trained network for TensorFlow Serving.",
    "serve": "Serve exported models on this machine, for development.",
    "zoo": "List, verify or extend the trained networks of the repository.",
    "reproduce": "Reproduce the tables and figures of the paper.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Calls a command.

    Args:
        argv: the command's name and its flags. Defaults to `None`, those of
            this process.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("help", "--help", "-h"):
        print(_overview())
        return 0 if argv else 1
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else "Try --help."
        return command.fail(
            command.PROGRAM, f"there is no command {name!r}. {hint}"
        )
    return importlib.import_module(f"keras_rub.cli.{name}").main(rest)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"Usage: {command.PROGRAM} COMMAND --FLAG=VALUE ...",
            "",
            *(f"  {name:{width}s}  {text}" for name, text in COMMANDS.items()),
            "",
            f"{command.PROGRAM} COMMAND --help shows the flags of a command.",
        ]
    )
