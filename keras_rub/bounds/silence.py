"""Keeps a C library from writing to the standard output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def without_lines(start: bytes) -> Iterator[None]:
    """Drops lines that begin so from the standard output of the process.

    All else that is written meanwhile, by other threads, comes out at the end.
    HiGHS prints a line by `printf` when it repairs a solution, which none of
    its options turns off: only the file descriptor itself is in the way.

    Args:
        start: how the lines begin.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        try:
            flush = ctypes.CDLL(None).fflush
            flush(None)
            real = os.dup(1)
        except (OSError, TypeError, AttributeError):
            # No such library (Windows), or no standard output.
            yield
            return
        stack.callback(os.close, real)
        held = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(held.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(real, 1)
            held.seek(0)
            kept = b"".join(line for line in held if not line.startswith(start))
            while kept:
                kept = kept[os.write(1, kept) :]
