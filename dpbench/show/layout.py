"""Tables as text for a terminal and as Markdown, and functions that write numbers."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from dpbench.core.files import printable

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 80
"""The width of a line in characters if no terminal reports a width."""

ABSENT = "-"
"""The text of an unknown number."""

Shown = tuple[str, Callable[[Any], str]]
"""A column of a table: its name in a frame, and the function that writes its values."""


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Args:
        title: the title above the table.
        headers: the headers of the columns.
        cells: the texts of each line.
        notes: the notes below the table.
        exact: the values that ``cells`` shows as texts, or an empty list.
        align: the alignment of all columns but the first, ``left`` or ``right``.
    """

    title: str
    headers: list[str]
    cells: list[list[str]]
    notes: tuple[str, ...] = ()
    exact: list[list[Any]] = field(default_factory=list)
    align: str = "right"

    @classmethod
    def of(
        cls, title: str, rows: pd.DataFrame, columns: Mapping[str, Shown], notes: Iterable[str] = ()
    ) -> Table:
        """Make a table with a line for each row of a frame.

        Args:
            title: the title above the table.
            rows: the frame.
            columns: the columns of the table by header.
            notes: the notes below the table.
        """
        writers = [write for _, write in columns.values()]
        exact = rows[[name for name, _ in columns.values()]].to_numpy(object).tolist()
        cells = [list(map(written, line, writers)) for line in exact]
        return cls(title, list(columns), cells, tuple(notes), exact)

    @property
    def numeric(self) -> list[bool]:
        """For each column, true if the column has numbers."""
        return [
            any(isinstance(v := line[place], Number) and v == v for line in self.exact)
            for place in range(len(self.headers))
        ]

    def as_text(self, width: int = WIDTH) -> str:
        """Write the table as text, with columns that do not fit into the width in blocks below."""
        blocks = [self._render(block, "simple") for block in self._blocks(width)]
        notes = [filled(note, width) for note in self.notes]
        lines = [filled(self.title, width), "", "\n\n".join(blocks), *notes]
        return printable("\n".join(lines))

    def as_markdown(self) -> str:
        """Write the table as a heading, a table of GitHub's Markdown, and notes."""
        # Line breaks are removed, because their only use is to make a long name fit a terminal.
        cells = [[escaped(cell.replace("\n", "")) for cell in line] for line in self.cells]
        plain = Table("", list(map(escaped, self.headers)), cells)
        body = plain._render(range(len(self.headers)), "github")
        return "\n\n".join([f"### {escaped(self.title)}", body, *map(escaped, self.notes)])

    def _blocks(self, width: int) -> Iterator[list[int]]:
        """Yield blocks of columns that fit into the width. Each block begins with the first column.

        A block of only two columns can be wider than the width.
        """
        block = [0]
        for index in range(1, len(self.headers)):
            lines = self._render([*block, index], "simple").splitlines()
            if max(map(len, lines)) > width and len(block) > 1:
                yield block
                block = [0]
            block.append(index)
        yield block

    def _render(self, columns: Sequence[int], style: str) -> str:
        headers, *cells = ([line[i] for i in columns] for line in (self.headers, *self.cells))
        align = ["left"] + [self.align] * (len(columns) - 1)
        return tabulate(cells, headers, tablefmt=style, colalign=align, disable_numparse=True)


def terminal_width() -> int:
    """Return the width of the terminal in characters, or `WIDTH` without a terminal."""
    return shutil.get_terminal_size(fallback=(WIDTH, 24)).columns


def filled(text: str, width: int) -> str:
    """Break a text into lines at spaces only."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def escaped(text: str) -> str:
    """Put a text on one line, and escape it so that GitHub's Markdown shows it unchanged.

    Underscores inside a word are not escaped, because GitHub shows them unchanged.
    """
    one_line = printable(" ".join(text.split()))
    return re.sub(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", one_line)


def written(value: Any, write: Callable[[Any], str]) -> str:
    """Write a value, or return `ABSENT` for None and NaN."""
    return ABSENT if value is None or value != value else write(value)


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds, with two digits after the point."""
    return f"{seconds * 1e3:.2f}"


def step_milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds, with one digit after the point.

    A time below 0.1 ms has up to three significant digits instead.
    """
    return f"{seconds * 1e3:.1f}" if abs(seconds) >= 1e-4 else f"{seconds * 1e3:.3g}"


BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
"""The units of bytes, each with its size in bytes."""


def byte_unit(largest: float) -> str:
    """Return the unit for numbers of bytes of which ``largest`` is the maximum."""
    return "kB" if largest < 1e6 else "MB" if largest < 1e9 else "GB"


def gigabytes(value: float) -> str:
    """Write bytes or bytes per second in units of 10⁹, with `three_digits`."""
    return three_digits(value / 1e9)


def three_digits(value: float) -> str:
    """Write a number that is not negative, with about three significant digits.

    Numbers below 0.1 have three digits at most, without zeros at the end. Positive numbers below
    0.0001 have an exponent.
    """
    if value < 0.1:
        return f"{value:.3g}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:.{digits}f}"


def as_text(tables: Iterable[Table], width: int = WIDTH) -> str:
    """Write tables one below the other as text."""
    return "\n\n".join(table.as_text(width) for table in tables)


def as_markdown(tables: Iterable[Table]) -> str:
    """Write tables one below the other as Markdown."""
    return "\n\n".join(table.as_markdown() for table in tables) + "\n"
