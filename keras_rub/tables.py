"""Tables as plain text, Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Sequence
from typing import Any

Row = Sequence[Any]


def percent(share: float | None, digits: int = 1) -> str:
    """A share from 0 to 1 as a percent; nothing where there is none."""
    return "" if share is None else f"{share:.{digits}%}"


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share from 0 to 1.

    Args:
        right: the share that was found.
        count: int. The samples that it was found in.
    """
    square = 1.959964**2
    middle = right + square / (2 * count)
    spread = math.sqrt(
        square * (right * (1 - right) / count + square / (4 * count**2))
    )
    scale = 1 + square / count
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return max(low, 0.0), min(high, 1.0)


def percent_with_interval(share: float | None, count: int) -> str:
    """A share as a percent, with its 95 % interval."""
    if share is None:
        return ""
    low, high = wilson(share, count)
    return f"{share:.1%} ({100 * low:.1f} to {100 * high:.1f})"


def columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The keys of all rows, each once, in the order of their first use."""
    return list(dict.fromkeys(key for row in rows for key in row))


def to_text(
    header: Row, rows: Sequence[Row], left: Sequence[int] = (0,)
) -> str:
    """A table for the screen, each column as wide as it needs to be.

    Args:
        header: names of the columns.
        rows: the cells; `str` is taken of each.
        left: numbers of the columns that begin at the left; all others end
            at the right. Defaults to the first.
    """
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(
                zip(row, widths, strict=True)
            )
        ).rstrip()
        for row in table
    )


def to_markdown(header: Row, rows: Sequence[Row]) -> str:
    """A Markdown table: the first column left, all others right.

    Args:
        header: names of the columns.
        rows: the cells; `str` is taken of each.
    """

    def line(cells):
        return "| " + " | ".join(map(str, cells)) + " |"

    rule = "| --- |" + " ---: |" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, rows)])


def to_html(
    header: Row | None, rows: Sequence[Row], kind: str | None = None
) -> str:
    """An HTML table; each cell has the name of its column as its class.

    Args:
        header: names of the columns, or `None` for a table without.
        rows: the cells; `str` is taken of each.
        kind: the class of the table, or `None`.
    """

    def attribute(name):
        return "" if name is None else f' class="{html.escape(str(name))}"'

    def line(tag, cells, names):
        found = "".join(
            f"<{tag}{attribute(name)}>{html.escape(str(cell))}</{tag}>"
            for cell, name in zip(cells, names, strict=True)
        )
        return f"<tr>{found}</tr>"

    head = ""
    if header is not None:
        head = f"<thead>{line('th', header, header)}</thead>"
    body = "".join(
        line("td", row, [None] * len(row) if header is None else header)
        for row in rows
    )
    return f"<table{attribute(kind)}>{head}<tbody>{body}</tbody></table>"


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Dicts as CSV; a cell is empty where a row lacks the key."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, columns_of(rows), restval="", lineterminator="\n"
    )
    if rows:
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
