"""Phases: a trainer marks the parts of its step; a listener decides what that means.

A trainer writes ``with phase("backward"):`` and nothing more. Marks are ignored by default. The
process that measures installs one `PhaseListener` around each active step: NVTX ranges under
a profiler, CUDA events for time, a byte counter for logical I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from dpbench.core.case import OUTSIDE, PHASES
from dpbench.core.errors import unknown

F = TypeVar("F", bound=Callable[..., Any])


class PhaseListener(Protocol):
    """Is told of each change of phase in a step. At each moment the step is in one phase."""

    def start_step(self) -> None:
        """A step begins, outside every phase."""

    def switch(self, phase: str) -> None:
        """The phase changes: further work belongs to ``phase``, one of `PHASES` or `OUTSIDE`."""

    def end_step(self) -> None:
        """The step is over."""


class OpenPhase:
    """A phase that has begun and not ended."""

    def __init__(self, name: str) -> None:
        self.name = name


class Step:
    """One step: its listener, if any, and its open phases, innermost last."""

    def __init__(self, listener: PhaseListener | None = None) -> None:
        self.listener = listener
        self._open = [OpenPhase(OUTSIDE)]

    @property
    def phase(self) -> str:
        """The innermost phase."""
        return self._open[-1].name

    def enter(self, name: str) -> OpenPhase:
        """Begin a phase inside those that are open."""
        entered = OpenPhase(name)
        self._open.append(entered)
        self._switch()
        return entered

    def leave(self, entered: OpenPhase) -> None:
        """End a phase and those inside it; do nothing if it has ended."""
        if entered in self._open:
            del self._open[self._open.index(entered) :]
            self._switch()

    def _switch(self) -> None:
        if self.listener:
            self.listener.switch(self.phase)


_step: ContextVar[Step | None] = ContextVar("dpbench_step", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a part of a training step.

    Phases may nest: the outer phase pauses while an inner one is open. So each byte and each
    second belong to one phase.
    """
    if name not in PHASES:
        raise unknown("phase", name, PHASES)
    step = _step.get()
    if step is None:
        yield
        return
    entered = step.enter(name)
    try:
        yield
    finally:
        step.leave(entered)


def in_phase(name: str, function: F) -> F:
    """Wrap a function so that it runs inside ``phase(name)``."""
    return phase(name)(function)


def set_current_step(step: Step | None) -> None:
    """Set the step to which `phase()` reports; with None it reports to nothing."""
    _step.set(step)


@contextmanager
def observed_step(listener: PhaseListener | None) -> Iterator[None]:
    """Report to ``listener`` the phases of the one step that runs in this context."""
    if listener is None:
        yield
        return
    listener.start_step()
    token = _step.set(Step(listener))
    try:
        yield
    finally:
        _step.reset(token)
        listener.end_step()
