"""How a command is called: flags of its own, help, errors in one line.

A command is a module with

- `FLAGS`, its own `Flags`, so that several commands can share a process,
- `run()`, which does the work and raises `ValueError` for a bad value,
- `main(argv)`, which calls `call`.
"""

from __future__ import annotations

import inspect
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

from absl import flags

PROGRAM = "keras-rub"

_HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")
_INDENT = " " * 4


class Flags(flags.FlagValues):
    """The flags of one command; a method for each kind of value.

    Every method takes the name, the default and the help, and returns what
    holds the value once the command is called.
    """

    def string(
        self, name: str, default: str | None, text: str
    ) -> flags.FlagHolder:
        """Any text."""
        return flags.DEFINE_string(name, default, text, flag_values=self)

    def choice(
        self, name: str, default: str | None, known: Iterable[str], text: str
    ) -> flags.FlagHolder:
        """One of the words that are known."""
        return flags.DEFINE_enum(
            name, default, list(known), text, flag_values=self
        )

    def words(self, name: str, default: str, text: str) -> flags.FlagHolder:
        """Words with commas, as a list."""
        return flags.DEFINE_list(name, default, text, flag_values=self)

    def whole(
        self,
        name: str,
        default: int | None,
        text: str,
        lowest: int | None = None,
    ) -> flags.FlagHolder:
        """A whole number."""
        return flags.DEFINE_integer(
            name, default, text, lowest, flag_values=self
        )

    def number(
        self,
        name: str,
        default: float | None,
        text: str,
        lowest: float | None = None,
        highest: float | None = None,
    ) -> flags.FlagHolder:
        """A number."""
        return flags.DEFINE_float(
            name, default, text, lowest, highest, flag_values=self
        )

    def switch(self, name: str, default: bool, text: str) -> flags.FlagHolder:
        """Yes or no."""
        return flags.DEFINE_bool(name, default, text, flag_values=self)


def call(
    name: str,
    flag_values: Flags,
    run: Callable[[], None],
    argv: Sequence[str] | None = None,
    about: str | None = None,
) -> int:
    """Calls one command.

    Args:
        name: of the command.
        flag_values: its flags; they are read anew at each call.
        run: what it does.
        argv: the arguments behind the command's name. Defaults to `None`,
            those of this process.
        about: what the help shows above the flags.

    Returns:
        The exit code: 0, 1 after a bad value, 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word in _HELP for word in argv):
        print(help_text(name, flag_values, about))
        return 0
    try:
        _parse(flag_values, argv)
        run()
    # What bad values, missing files and folders that can't be written raise.
    except (flags.Error, ValueError, OSError) as error:
        return fail(f"{PROGRAM} {name}", error)
    except Exception as error:
        # TensorFlow's writers have an error of their own for a full disk.
        if "No space left on device" not in str(error):
            raise
        return fail(f"{PROGRAM} {name}", "No space left on device.")
    except KeyboardInterrupt:
        print(f"{PROGRAM} {name}: interrupted", file=sys.stderr)
        return 130
    return 0


def fail(where: str, error: Exception | str) -> int:
    """Prints an error in one line and returns the exit code."""
    print(f"{where}: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def help_text(name: str, flag_values: Flags, about: str | None) -> str:
    """What a command does and all its flags."""
    parts = [inspect.cleandoc(about or ""), f"Flags of {PROGRAM} {name}:"]
    for flag_name in flag_values:
        flag = flag_values[flag_name]
        title = "[no]" + flag.name if flag.boolean else flag.name
        lines = [f"--{title}"]
        text = flag.help
        if flag.boolean:
            text += f" (default: {'yes' if flag.default else 'no'})"
        elif flag.default_as_str is not None:
            text += f" (default: {flag.default_as_str.strip(chr(39))})"
        lines += textwrap.wrap(
            text, 79, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def line(name: str, flag_values: Flags) -> str:
    """The command line that gives the same flags again."""
    words = [
        word
        for flag_name in flag_values
        if not flag_values[flag_name].using_default_value
        for word in flag_values[flag_name].serialize().splitlines()
    ]
    return shlex.join([PROGRAM, name, *words])


def _parse(flag_values, argv) -> None:
    flag_values.unparse_flags()
    for name in flag_values:
        flag_values[name].unparse()
    extra = flag_values([PROGRAM, *argv])[1:]
    if extra:
        raise ValueError(
            "a command takes flags only, such as --rho=1. "
            f"Received: {' '.join(extra)}"
        )
