"""How far a kernel replay has come, from what ncu prints at each kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dpbench.instruments.ncu.kernel_report import PROFILING
from dpbench.instruments.terminal import begin_line, place


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


@contextmanager
def launch_progress(description: str, total: int | None) -> Iterator[LaunchCounter]:
    """A progress bar with the time left, on a terminal; without a total only the count.

    None in an xdist worker, one of many.

    Args:
        description: what is measured.
        total: how many kernels there will be, if it is known.
    """
    from tqdm import tqdm

    hidden = "PYTEST_XDIST_WORKER" in os.environ or not place().isatty()
    if not hidden:
        begin_line()
    with tqdm(
        total=total, desc=description, unit="kernel", leave=False, disable=hidden, file=place()
    ) as bar:
        yield LaunchCounter(bar)
