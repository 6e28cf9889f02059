"""Where a person sees at once what a measurement has to say, even if a test runner catches it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

_terminal: ContextVar[TextIO | None] = ContextVar("terminal", default=None)


@contextmanager
def shown_on(terminal: TextIO | None) -> Iterator[None]:
    """Let messages and progress bars appear there; on standard error if it is None."""
    token = _terminal.set(terminal)
    try:
        yield
    finally:
        _terminal.reset(token)


def place() -> TextIO:
    """Where messages and progress bars go."""
    return _terminal.get() or sys.stderr


def begin_line() -> None:
    """End the line on which a test runner may have left its own progress."""
    if terminal := _terminal.get():
        terminal.write("\n")


def tell(text: str) -> None:
    """Say something now."""
    begin_line()
    print(f"dpbench: {text}", file=place(), flush=True)
