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
    """Let what is told appear there; on standard error if it is None."""
    token = _terminal.set(terminal)
    try:
        yield
    finally:
        _terminal.reset(token)


def tell(text: str) -> None:
    """Say something now; a test runner may have left its own progress on the line before."""
    terminal = _terminal.get()
    begin = "\n" if terminal else ""
    print(f"{begin}dpbench: {text}", file=terminal or sys.stderr, flush=True)
