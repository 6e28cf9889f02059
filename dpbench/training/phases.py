"""Phases: a trainer says where it is; whoever listens decides what that means.

A trainer writes ``with phase("backward"):`` and nothing more. By default nobody listens. The
process that measures installs one `PhaseListener` around each active step: NVTX ranges under
a profiler, CUDA events for time, a byte counter for logical I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

from dpbench.case import OUTSIDE, PHASES
from dpbench.errors import unknown

P = ParamSpec("P")
R = TypeVar("R")


class PhaseListener(Protocol):
    """Hears in which phase a step is; at each moment it is in exactly one."""

    def start_step(self) -> None:
        """A step begins, outside every phase."""

    def switch(self, phase: str) -> None:
        """From here on, work belongs to ``phase`` (one of `PHASES`, or `OUTSIDE`)."""

    def end_step(self) -> None:
        """The step is over."""


class _Step:
    """One step under observation: the listener, and the phases that are open."""

    def __init__(self, listener: PhaseListener) -> None:
        self.listener = listener
        self.open = [OUTSIDE]


_step: ContextVar[_Step | None] = ContextVar("dpbench_step", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a part of a training step.

    Phases may nest: the inner one takes over, and the outer one goes on when it ends, so each
    byte and each second belong to one phase.

    Raises:
        ConfigurationError: ``name`` is not one of `PHASES`.
    """
    if name not in PHASES:
        raise unknown("phase", name, PHASES)
    step = _step.get()
    if step is None:
        yield
        return
    step.open.append(name)
    step.listener.switch(name)
    try:
        yield
    finally:
        step.open.pop()
        step.listener.switch(step.open[-1])


def in_phase(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """A function that does the same inside ``phase(name)``."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with phase(name):
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def observed_step(listener: PhaseListener | None) -> Iterator[None]:
    """Let ``listener`` hear the phases of the one step that runs inside."""
    if listener is None:
        yield
        return
    listener.start_step()
    token = _step.set(_Step(listener))
    try:
        yield
    finally:
        _step.reset(token)
        listener.end_step()
