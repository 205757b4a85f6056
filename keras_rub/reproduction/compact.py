"""Results in few characters, since those of all jobs are committed."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np


def pack(places: Iterable[int]) -> str:
    """A set of whole numbers as text, a bit for each number of its range.

    Args:
        places: none of them negative; order and repetition don't count.

    Returns:
        The smallest one, a colon, and the bits from there on in base64; the
        empty text of no places. Equal sets give equal texts.
    """
    numbers = np.unique(np.asarray(list(places), dtype=np.int64))
    if not len(numbers):
        return ""
    bits = np.zeros(numbers[-1] - numbers[0] + 1, bool)
    bits[numbers - numbers[0]] = True
    code = np.packbits(bits).tobytes()
    return f"{numbers[0]}:{base64.b64encode(code).decode()}"


def unpack(text: str) -> list[int]:
    """The places that `pack` made a text of, in ascending order."""
    if not text:
        return []
    first, _, code = text.partition(":")
    bits = np.unpackbits(np.frombuffer(base64.b64decode(code), np.uint8))
    return (np.flatnonzero(bits) + int(first)).tolist()


def to_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows of the same keys as one list a key, which names each key once."""
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def to_rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The rows that `to_columns` took."""
    return [
        dict(zip(columns, values, strict=True))
        for values in zip(*columns.values(), strict=True)
    ]
