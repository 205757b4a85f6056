"""Commands called in this process, as a shell would call them."""

from keras_rub.cli import main


def arguments(flags):
    """Flags as words of a command line; lists with commas."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no{name}")
            continue
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        words.append(f"--{name}={value}")
    return words


def call(capsys, name, **flags):
    """Calls a command that must succeed; returns what it printed."""
    capsys.readouterr()
    code = main.main([name, *arguments(flags)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def refused(capsys, name, *words, **flags):
    """Calls a command that must fail; returns its one line of error."""
    capsys.readouterr()
    code = main.main([name, *words, *arguments(flags)])
    shown = capsys.readouterr()
    assert code == 1, (shown.out, shown.err)
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("keras-rub")
    return lines[0]
