"""A progress bar that stays out of the way of short work."""

from __future__ import annotations

import time

import keras

_PATIENCE = 3.0  # seconds before an automatic bar appears


class Progress:
    """Counts finished samples and shows them with the time that is left.

    Args:
        total: int or `None`. How many samples there are, if that is known.
        verbose: 0 for silence, 1 for a bar, `"auto"` for a bar as soon as the
            work takes longer than three seconds. Defaults to `"auto"`.
    """

    def __init__(self, total: int | None, verbose: int | str = "auto"):
        if verbose not in (0, 1, "auto"):
            raise ValueError(
                '`verbose` must be 0, 1 or "auto". '
                f"Received: `verbose={verbose!r}`"
            )
        self._bar = (
            keras.utils.Progbar(total, unit_name="sample") if verbose else None
        )
        self._start = time.monotonic()
        self._patience = _PATIENCE if verbose == "auto" else 0.0
        self._total = total
        self._shown = False

    def update(self, done: int) -> None:
        """Says how many samples are finished."""
        if self._bar is None:
            return
        waited = time.monotonic() - self._start
        finished = self._total is not None and done >= self._total
        if waited >= self._patience and (self._shown or not finished):
            self._shown = True
            self._bar.update(done)
