"""Phases of a training step, and listeners that are told which phase a step is in.

A trainer marks its phases by ``with phase("backward"):``. By default, these marks do nothing. A
measured process sets a `PhaseListener` for each observed step. For example, a listener may begin an
NVTX range for each phase, record CUDA events, or count bytes.
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
    """Interface of objects that are called when a step begins, enters another phase, or ends.

    At each moment, the step is in exactly one of `PHASES`, or `OUTSIDE` every phase.
    """

    def start_step(self) -> None:
        """Handle the beginning of a step, which begins outside every phase."""

    def switch(self, phase: str) -> None:
        """Handle a change of phase: ``phase``, one of `PHASES` or `OUTSIDE`, begins."""

    def end_step(self) -> None:
        """Handle the end of a step."""


class OpenPhase:
    """A phase that has begun and has not ended. Two open phases may have the same name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Step:
    """A training step, which knows its open phases, and its listener if it has one."""

    def __init__(self, listener: PhaseListener | None = None) -> None:
        self.listener = listener
        self._open = [OpenPhase(OUTSIDE)]

    @property
    def phase(self) -> str:
        """Name of the innermost open phase."""
        return self._open[-1].name

    def enter(self, name: str) -> OpenPhase:
        """Begin a phase inside the innermost open phase."""
        entered = OpenPhase(name)
        self._open.append(entered)
        self._switch()
        return entered

    def leave(self, entered: OpenPhase) -> None:
        """End a phase, and all phases inside it. Do nothing if the phase has already ended."""
        if entered in self._open:
            del self._open[self._open.index(entered) :]
            self._switch()

    def _switch(self) -> None:
        if self.listener:
            self.listener.switch(self.phase)


_step: ContextVar[Step | None] = ContextVar("dpbench_step", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of a training step.

    Phases may nest. The outer phase pauses while an inner phase is open, so each byte and each
    second is counted in at most one phase.
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
    """Set the step to which `phase` reports. With None, `phase` does nothing."""
    _step.set(step)


@contextmanager
def observed_step(listener: PhaseListener | None) -> Iterator[None]:
    """Report to ``listener`` the phases of the step that runs in this context."""
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
