"""The instrument ``logical`` counts the bytes that a step must move, by operator, without a GPU.

In a case, the real trainer runs on tensors without data. The module `counter` receives the
trainer's operators, and `rules` computes how many bytes each operator must move.

Logical bytes assume that no cache keeps data from one operator to the next. On an
H200, logical bytes and DRAM counters differ by a few percent if tensors are larger than the L2
cache. Steps with long sequences move more than the logical bytes, because large matrix products
read operands several times. Steps of tiny models move fewer bytes than the logical bytes, because
all tensors stay in the L2 cache.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import dataclass
from typing import ClassVar

from dpbench.child.recorder import Recorder
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.registry import is_builtin
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.instruments.logical.recorder import LogicalRecorder
from dpbench.launch.case_process import CaseProcess, PendingMeasurement
from dpbench.results.outcome import Outcome


@dataclass(frozen=True)
class Logical(Instrument):
    """An instrument that counts a step of a case without a GPU, and without allocating tensors.

    The instrument counts the first steady step. A step is steady if the live bytes before and
    after the step are equal, up to a small fraction. A first step is often not steady, because
    the optimizer allocates state. Steps after the first steady step are assumed to be equal. If
    none of the first steps is steady, the last of them is counted and a note is added.

    With Poisson sampling, batches have different sizes. The instrument then also counts a step of
    each sampled size. The counts by operator come from the steady step, whose batch has the
    expected size.

    For a case of several ranks, the first rank is counted (see `one_rank`), in its second step or
    later. In the first step PyTorch runs additional operators on whole tensors to find how the
    tensors are sharded.

    A case is counted in a new process if one of its classes is not built in, because foreign code
    may crash or hang. A new process is also used if this process is in a process group of
    ``torch.distributed``.

    Attributes:
        timeout: limit in seconds for the new process, as in `CaseProcess`.
        active: number of Poisson batches to count.
    """

    name: ClassVar[str] = "logical"
    hardware: ClassVar[bool] = False
    by_rank: ClassVar[bool] = True

    timeout: float = 600.0
    active: int = Settings.active

    @classmethod
    def from_settings(cls, settings: Settings) -> Logical:
        return cls(settings.timeout, settings.active)

    def start(self, case: Case) -> PendingMeasurement:
        """Start a new process, or return a measurement that counts in this process later."""
        if is_builtin(case) and not _in_process_group():
            return Counting(self, case)
        return CaseProcess(Task(case, self), log=None, timeout=self.timeout)

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return LogicalRecorder(steps)

    def record_case(self, case: Case) -> Outcome:
        faulthandler.enable(2)  # after a crash, the log contains a stack
        return self.count(case)

    def count(self, case: Case) -> Outcome:
        """Count a case in this process."""
        from dpbench.instruments.logical.case_count import count_case  # imports torch

        return count_case(case, self.active)


@dataclass(eq=False)
class Counting(PendingMeasurement):
    """A measurement of a case in this process. `outcome` counts the case."""

    instrument: Logical
    case: Case

    def outcome(self) -> Outcome:
        return self.instrument.count(self.case)


def _in_process_group() -> bool:
    """Return True if this process is in a process group, which would disturb the counting."""
    torch = sys.modules.get("torch")
    distributed = torch and torch.distributed
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
