"""How far a kernel replay has come, from what ncu prints at each kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO

from dpbench.instruments.ncu.kernel_report import PROFILING


@dataclass
class LaunchCounter:
    """Counts kernels in a log that arrives piece by piece.

    Args:
        bar: whatever has ``update(n)``, such as a ``tqdm``.
    """

    bar: Any
    _rest: str = field(default="", init=False)

    def __call__(self, text: str) -> None:
        """Take the next piece of the log."""
        text = self._rest + text
        found = text.count(PROFILING)
        if found:
            self.bar.update(found)
            text = text[text.rindex(PROFILING) + len(PROFILING) :]
        self._rest = text[-len(PROFILING) :]


_terminal: ContextVar[TextIO | None] = ContextVar("terminal", default=None)


@contextmanager
def shown_on(terminal: TextIO | None) -> Iterator[None]:
    """Let progress bars appear on a terminal, where standard error is caught; None changes nothing.

    They begin a line of their own: the last one may hold what a test runner has printed.
    """
    if terminal is not None:
        terminal.write("\n")
    token = _terminal.set(terminal)
    try:
        yield
    finally:
        _terminal.reset(token)


@contextmanager
def launch_progress(description: str, total: int | None) -> Iterator[LaunchCounter]:
    """A progress bar with the time left, on a terminal; without a total only the count.

    Args:
        description: what is measured.
        total: how many kernels there will be, if it is known.
    """
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=description,
        unit="kernel",
        leave=False,
        disable=None,
        file=_terminal.get() or sys.stderr,
    ) as bar:
        yield LaunchCounter(bar)
