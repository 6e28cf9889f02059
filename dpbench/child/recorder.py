"""Recorders observe steps and phases in the process that trains, and make rows from them.

Each instrument has its own class of recorder. A recorder runs in the process of a case, of a script
or of a test. Recorders import torch only when the first step begins, because a script may set up
its environment before the script imports torch.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, ClassVar

from dpbench.core.case import OUTSIDE
from dpbench.core.subject import Subject
from dpbench.results.kernels import MemoryLine, OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.training.phases import PhaseListener

WHOLE_STEPS = 3
"""Number of short steps that are each measured as a whole, not by phase. A CPU pause may spoil a
single step."""

SHORT_SECONDS = 1.0
"""A step that takes less than this number of seconds is short."""


class NullListener(PhaseListener):
    """A listener that ignores all steps and phases."""

    def start_step(self) -> None:
        return

    def switch(self, phase: str) -> None:
        return

    def end_step(self) -> None:
        return


class Calls:
    """Receives the calls that the training loop makes in a step. This base class does nothing.

    Attributes:
        compares_steps: whether optimizers must take the same turns in each step.
    """

    compares_steps: ClassVar[bool] = True

    def forward(self, call: Callable[..., Any], module: Any, args: Any, options: Any) -> Any:
        """Return ``call(module, *args, **options)``, the result of a module called by the loop."""
        return call(module, *args, **options)

    def batch(self, dataset: Any, batch: Any) -> None:
        """Handle a batch that a data loader has fetched, also before the observed steps."""

    def backward(self) -> None:
        """Handle the beginning of a backward pass."""

    def update(self, optimizer: Any) -> None:
        """Handle the beginning of an optimizer's step."""

    def private_step(self, optimizer: Any, step: Callable[[], Any]) -> None:
        """Handle the beginning of a step of Opacus's optimizer, which ``step`` takes once more.

        Or of the update of a `FusedTrainer`, whose sums without noise ``step`` returns.
        """

    def begin_private(self, trainer: Any) -> None:
        """Handle the beginning of a batch that a `FusedTrainer` clips."""

    def schedule_by(self, metric: Any) -> None:
        """Handle a metric that the learning rate follows."""


class Recorder(PhaseListener):
    """Observes a number of steps of any training loop.

    A subclass overrides `rows`. A subclass also overrides either `listener`, or some of the methods
    `start_step`, `switch` and `end_step`. Such a method also calls the base class's method.

    Args:
        wanted: number of steps to observe; None for all steps.

    Attributes:
        quick: whether making rows is fast enough to do so after each step.
        hears_warmup: whether the recorder also observes a case's warm-up steps.
        calls: receives the calls that the training loop makes.
        sizes: the sizes of a case's batches if they differ; set before the last step.
        wait: whether `rows` waits for the GPU. If not, `rows` uses only steps that the GPU has
            finished.
        operators: the operators of the last step, if the recorder counts operators.
        memory_lines: the lines that hold memory at the peak, if the recorder counts memory.
        notes: assumptions behind the rows.
        observed: number of observed steps.
        phases: for each step that has begun, the phases that occurred in the step.
        held: resources that `close` releases.
    """

    quick: ClassVar[bool] = True
    hears_warmup: ClassVar[bool] = False

    calls = Calls()
    sizes: Sequence[int] = ()

    wait = True
    operators: Sequence[OperatorCount] = ()
    memory_lines: Sequence[MemoryLine] = ()
    notes: Sequence[str] = ()

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.observed = 0
        self.phases: list[set[str]] = []
        self.held = ExitStack()

    def prepare(self) -> None:
        """Do slow work, or work that may fail, such as imports, before the GPU is locked."""

    def compiler(self, eval_frame: Any) -> None:
        """Prepare for functions that use torch.compile, once PyTorch has imported its compiler.

        Args:
            eval_frame: the module ``torch._dynamo.eval_frame``.
        """

    @property
    def finished(self) -> bool:
        """True if the recorder has observed all wanted steps."""
        return self.wanted is not None and self.observed >= self.wanted

    @cached_property
    def listener(self) -> PhaseListener:
        """Receiver of steps and phases, made when the first step begins and the device is known."""
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
        """Return the rows of the completed steps. Call this only after a step was observed."""

    def details(self) -> Mapping[str, Any]:
        """Return what the parent process needs besides the rows, as plain JSON types."""
        return {}

    def outcome(self, case: Subject) -> Outcome:
        """Return the outcome of the observed steps."""
        rows = tuple(self.rows(case)) if self.observed else ()
        present = Counter(phase for step in self.phases[: self.observed] for phase in step)
        some = [
            f"{phase} is present in {times} of {self.observed} steps"
            for phase, times in sorted(present.items())
            if times < self.observed
        ]
        more = self.details() if self.observed else {}
        return Outcome(
            case,
            rows,
            operators=tuple(self.operators),
            memory_lines=tuple(self.memory_lines),
            notes=(*self.notes, *some),
            details={**device_and_torch(), "observed": self.observed, **more},
        )

    def close(self) -> None:
        """Release the recorder's resources in this process, such as dispatch modes and counters."""
        self.held.close()

    def forked(self) -> None:
        """Release inherited resources in a fork of this process. The parent keeps its counters."""


def whole_steps(seconds: float) -> int:
    """Return the number of steps to measure as a whole, from the duration of one step in seconds.

    All ranks use the duration in rank 0.
    """
    from dpbench.training.parallel import all_gather  # this module imports torch

    return int(all_gather(str(WHOLE_STEPS if seconds < SHORT_SECONDS else 1))[0])


def on_cuda() -> bool:
    """Return True if this process uses a GPU."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


def device_and_torch() -> dict[str, str]:
    """Return the device and the PyTorch version of this process. PyTorch need not be loaded."""
    torch = sys.modules.get("torch")
    return {
        "device": torch.cuda.get_device_name() if torch and on_cuda() else "cpu",
        "torch": str(getattr(torch, "__version__", "not loaded")),
    }
