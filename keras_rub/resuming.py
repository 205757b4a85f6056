"""Long work that goes on where it stopped.

Whatever is kept lies beside the settings that decide it, and other settings
never get hold of it.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_rub.files import read_json, write_json


def differing(settings: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """The names of the settings that differ, as JSON would keep them."""
    settings, others = json.loads(json.dumps([settings, others]))
    missing = object()
    return sorted(
        key
        for key in {*settings, *others}
        if settings.get(key, missing) != others.get(key, missing)
    )


def require_same(
    settings: dict[str, Any],
    others: dict[str, Any],
    where: str | os.PathLike,
    choose: str = "folder",
) -> None:
    """Raises one line if the settings of an earlier run are other ones.

    Args:
        settings: those of this run.
        others: those of the earlier run.
        where: what the earlier run has written.
        choose: what the user can choose anew, such as `"--out"`.
    """
    changed = differing(settings, others)
    if changed:
        raise ValueError(
            f"{where} holds another run: {', '.join(changed)} differ. "
            f"Choose another {choose}."
        )


def claim(
    folder: str | os.PathLike,
    settings: dict[str, Any],
    facts: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> None:
    """Makes a folder this run's own by its config.json, or refuses.

    Args:
        folder: the folder; it is made if it is missing.
        settings: everything that decides the results, ready for JSON.
        facts: what else readers of the file want to know; another run may
            have other ones. Defaults to `None`.
        defaults: settings for which an earlier version had no name, and what
            it did. Defaults to `None`.
    """
    path = pathlib.Path(folder) / "config.json"
    facts = facts or {}
    if path.exists():
        others = read_json(path)
        if not isinstance(others, dict):
            raise ValueError(
                f"{path} holds no settings of a run. Choose another folder."
            )
        known = {k: v for k, v in others.items() if k not in facts}
        require_same(settings, {**(defaults or {}), **known}, folder)
    else:
        write_json(path, {**settings, **facts}, indent=2)


class Parts:
    """The finished parts of one piece of work, in one JSON file.

    The file holds `{"settings": ..., "done": {name: result}}` and is written
    anew after each part. That of an earlier run of the same settings is taken
    up; one of other settings is refused.

    Args:
        path: the file.
        settings: everything that decides the results, ready for JSON.
        choose: what the user can choose anew if the file is another run's.
            Defaults to `"--out"`.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        settings: dict[str, Any],
        choose: str = "--out",
    ):
        self.path = pathlib.Path(path)
        self.settings = settings
        self.done: dict[str, Any] = {}
        if self.path.exists():
            state = read_json(self.path)
            if not isinstance(state, dict) or not all(
                isinstance(state.get(key), dict) for key in ("settings", "done")
            ):
                raise ValueError(
                    f"{self.path} holds no earlier run. Choose another "
                    f"{choose}."
                )
            require_same(settings, state["settings"], self.path, choose)
            self.done = state["done"]

    def __contains__(self, name: str) -> bool:
        return name in self.done

    def __getitem__(self, name: str) -> Any:
        return self.done[name]

    def __len__(self) -> int:
        return len(self.done)

    def add(self, name: str, result: Any) -> None:
        """Keeps the result of a part, ready for JSON."""
        self.done[name] = result
        write_json(self.path, {"settings": self.settings, "done": self.done})

    def work_off(self, jobs: Mapping[str, Callable[[], Any]]) -> None:
        """Does the parts that are not done yet, and says how it goes.

        Args:
            jobs: from the name of each part to what returns its result.
        """
        left = [name for name in jobs if name not in self]
        done = len(jobs) - len(left)
        if done:
            print(f"resuming: {done} of {len(jobs)} parts done", flush=True)
        start = time.monotonic()
        for number, name in enumerate(left, start=1):
            self.add(name, jobs[name]())
            spent = time.monotonic() - start
            ahead = spent / number * (len(left) - number)
            print(
                f"part {done + number} of {len(jobs)} ({name}) done, "
                f"{ahead:.0f} s left",
                flush=True,
            )

    def remove(self) -> None:
        """Deletes the file, when the whole work is done."""
        self.path.unlink(missing_ok=True)
