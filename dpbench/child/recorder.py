"""Recorders observe steps and phases in the process that trains, and make rows from them.

Each instrument has one recorder. The same recorder runs in the process of a case, of a script or of
a test, with that process's tensors and devices. A script may set up its environment before it
imports torch. So a recorder imports torch only when the first step begins.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from dpbench.core.case import OUTSIDE
from dpbench.core.subject import Subject
from dpbench.results.kernels import MemoryLine, OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.training.phases import PhaseListener

WHOLE_STEPS = 3
"""How many short steps are observed as a whole: a single one may coincide with a CPU pause."""

SHORT_SECONDS = 1.0
"""Steps shorter than this are observed several times."""


class NullListener(PhaseListener):
    """A listener that ignores everything."""

    def start_step(self) -> None:
        return

    def switch(self, phase: str) -> None:
        return

    def end_step(self) -> None:
        return


class Calls:
    """Is told of the calls that a step consists of; this class ignores them."""

    def forward(self, call: Callable[..., Any], module: Any, args: Any, options: Any) -> Any:
        """The loop calls a module; return ``call(module, *args, **options)``."""
        return call(module, *args, **options)

    def backward(self) -> None:
        """The loop begins a backward pass."""

    def update(self, optimizer: Any, outer: Any) -> None:
        """An optimizer begins its step, called by the wrapper ``outer`` (of Opacus), if any."""


class Recorder(PhaseListener):
    """Observes a number of steps of any training loop.

    A subclass overrides `rows`, and either `listener` or `start_step`, `switch` and `end_step`, of
    which it also calls the base methods.

    Args:
        wanted: the number of steps; None for all.
    """

    quick: ClassVar[bool] = True  # whether rows can be made after each step
    hears_warmup: ClassVar[bool] = False  # whether it also observes a case's warm-up steps

    calls = Calls()
    more: Mapping[str, Any] = MappingProxyType({})  # further keys of a script's record

    wait = True  # whether to wait for the GPU; otherwise use the steps it has finished
    operators: Sequence[OperatorCount] = ()  # of the last step, if it counts operators
    memory_lines: Sequence[MemoryLine] = ()  # at the peak of memory, if it counts memory
    notes: Sequence[str] = ()  # assumptions behind the rows

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.observed = 0
        self.phases: list[set[str]] = []  # by begun step
        self.held = ExitStack()  # what `close` releases

    def prepare(self) -> None:
        """Do, before this process locks its GPU, what is slow or may fail, such as imports."""

    @property
    def finished(self) -> bool:
        """Whether it has observed as many steps as it wanted."""
        return self.wanted is not None and self.observed >= self.wanted

    @cached_property
    def listener(self) -> PhaseListener:
        """The listener to phases, made when the first step begins and the device is known."""
        return NullListener()

    def start_step(self) -> None:
        self.listener.start_step()
        self.phases.append({OUTSIDE})

    def switch(self, phase: str) -> None:
        self.listener.switch(phase)
        self.phases[-1].add(phase)

    def end_step(self) -> None:
        self.listener.end_step()
        self.observed += 1
        if self.finished:
            self.close()

    @abstractmethod
    def rows(self, case: Subject) -> list[Measurement]:
        """The rows of the completed steps; called with at least one."""

    def outcome(self, case: Subject) -> Outcome:
        """The outcome of the steps, in the same form as that of a case."""
        rows = tuple(self.rows(case)) if self.observed else ()
        present = Counter(phase for step in self.phases[: self.observed] for phase in step)
        some = [
            f"{phase} is present in {times} of {self.observed} steps"
            for phase, times in sorted(present.items())
            if times < self.observed
        ]
        outcome = Outcome(case, rows, operators=tuple(self.operators), notes=(*self.notes, *some))
        return replace(outcome, memory_lines=tuple(self.memory_lines))

    def record(self, case: Subject) -> dict[str, Any]:
        """The recorder's part of a case's record, as plain JSON types."""
        return {"outcome": self.outcome(case).as_json()}

    def close(self) -> None:
        """Release what the recorder holds in this process, such as modes and counters."""
        self.held.close()

    def forked(self) -> None:
        """In a fork of this process, release what it inherited; the parent keeps counters."""


def whole_steps(seconds: float) -> int:
    """How many steps of this duration are observed as a whole; rank 0 decides for all ranks."""
    from dpbench.child.rank_messages import all_gather  # which imports torch

    return int(all_gather(str(WHOLE_STEPS if seconds < SHORT_SECONDS else 1))[0])


def on_cuda() -> bool:
    """Whether this process uses a GPU."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


def device_and_torch() -> dict[str, str]:
    """The device and the PyTorch version of this process, as in a case's record."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if on_cuda() else "cpu",
        "torch": torch.__version__,
    }
