"""Where a person sees at once what a measurement has to say, even if a test runner catches it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Uncaught = Callable[[], AbstractContextManager[object]]
"""Makes a context in which a test runner catches nothing."""

_uncaught: ContextVar[Uncaught | None] = ContextVar("uncaught", default=None)


@contextmanager
def shown_past(uncaught: Uncaught) -> Iterator[None]:
    """Let what is told pass a test runner that catches output."""
    token = _uncaught.set(uncaught)
    try:
        yield
    finally:
        _uncaught.reset(token)


def tell(text: str) -> None:
    """Say something now; a test runner may have left its own progress on the line before."""
    uncaught = _uncaught.get()
    begin = "\n" if uncaught else ""
    with uncaught() if uncaught else nullcontext():
        print(f"{begin}dpbench: {text}", file=sys.stderr, flush=True)
