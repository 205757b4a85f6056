"""Flags that are written as text: numbers, radii, a valid range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_rub.perturbations import canonical_norm, check_rho


def parse_numbers(text: str, flag: str) -> list[float]:
    """Numbers with commas between.

    Args:
        text: such as `"0.5,1"`.
        flag: its name, for the error.
    """
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{flag} must be numbers with commas between. Received: {text}"
        ) from None


def parse_count(text: str, flag: str) -> int | str:
    """A whole number of at least 1, or `"all"`.

    Args:
        text: such as `"4"`.
        flag: its name, for the error.
    """
    if text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"--{flag} must be all or a whole number of at least 1. "
            f"Received: {text}"
        )
    return int(text)


def parse_names(text: str, flag: str) -> list[str]:
    """Names with commas between.

    Args:
        text: such as `"age,sex"`.
        flag: its name, for the error.
    """
    names = [word.strip() for word in text.split(",")]
    if "" in names:
        raise ValueError(
            f"--{flag} must be names with commas between. Received: {text}"
        )
    return names


def parse_pairs(
    text: str,
    flag: str,
    read: Callable[[str], Any],
    needed: bool = False,
) -> dict[str, Any]:
    """Names with commas between, each with or without a value.

    Args:
        text: such as `"job=2,zip"`.
        flag: its name, for the error.
        read: makes the value of the word behind the equals sign.
        needed: bool. Whether each name must have one. Defaults to `False`.

    Returns:
        From each name to its value, or to `None`.
    """
    found = {}
    for part in parse_names(text, flag):
        # A name may hold an equals sign, a value never does.
        name, equals, word = part.rpartition("=")
        try:
            if not equals and needed:
                raise ValueError
            found[name if equals else word] = read(word) if equals else None
        except ValueError:
            raise ValueError(
                f"--{flag} must be NAME=VALUE with commas between"
                + ("" if needed else ", or NAME alone")
                + f". Received: {part}"
            ) from None
    return found


def parse_ends(word: str) -> tuple[float, float]:
    """The ends of a range: `"0:120"`."""
    low, high = word.split(":")
    return float(low), float(high)


def parse_norms(words: Sequence[str], flag: str) -> list[int | str]:
    """Norms: 1, 2 and inf.

    Args:
        words: such as `["1", "inf"]`.
        flag: its name, for the error.
    """
    try:
        norms = [canonical_norm(word.strip()) for word in words]
    except ValueError:
        norms = []
    if not norms or len(set(norms)) < len(norms):
        raise ValueError(
            f"--{flag} must be 1, 2 or inf, each once, with commas between. "
            f"Received: {','.join(words)}"
        )
    return norms


def parse_radii(
    text: str, flag: str, norms: Sequence[int | str] | None = None
) -> dict[int | str, list[float]]:
    """The radii of each norm.

    Args:
        text: `"0.5,1"`, for all norms, or `"1:0.5,1;inf:0.05"`.
        flag: its name, for the error.
        norms: the norms that have radii; `None` for those that the text
            names, and then it has to.
    """
    try:
        if ":" in text:
            pairs = [part.split(":") for part in text.split(";")]
            found = {
                canonical_norm(norm.strip()): parse_numbers(radii, flag)
                for norm, radii in pairs
            }
        else:
            found = dict.fromkeys(norms or (), parse_numbers(text, flag))
        for radii in found.values():
            for radius in radii:
                check_rho(radius)
        if not found or set(norms or found) - set(found):
            raise ValueError
    except ValueError:
        forms = "NORM:numbers with semicolons between, such as 1:0.5,1;inf:0.05"
        if norms is not None:
            forms = f"numbers with commas between, or for each norm {forms}"
        raise ValueError(
            f"--{flag} must be {forms}; each at least 0. Received: {text}"
        ) from None
    return found if norms is None else {norm: found[norm] for norm in norms}


def parse_range(text: str, flag: str) -> str | tuple[float, float] | None:
    """A valid range: `None` for none, `"data"`, or a pair.

    Args:
        text: `"none"`, `"data"` or such as `"0,1"`.
        flag: its name, for the error.
    """
    if text in ("none", "data"):
        return None if text == "none" else text
    try:
        low, high = parse_numbers(text, flag)
        if not low < high:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--{flag} must be LOW,HIGH with LOW below HIGH, or data, or none. "
            f"Received: {text}"
        ) from None
    return low, high
