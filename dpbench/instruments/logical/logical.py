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
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from unittest.mock import patch

from dpbench.child.recorder import Recorder
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.case_names import is_builtin
from dpbench.core.errors import CaseFailed, DpbenchError, own_line
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.instruments.logical.recorder import LogicalRecorder, freeze_existing_objects
from dpbench.launch.case_process import CaseProcess, PendingMeasurement
from dpbench.launch.fork_server import fork_server
from dpbench.results.kernels import OperatorCount, guesses
from dpbench.results.outcome import Outcome
from dpbench.training.phases import observed_step

if TYPE_CHECKING:
    from dpbench.instruments.logical.counter import OperatorCounter
    from dpbench.training.base import TrainerBase

T = TypeVar("T")

STEADY = 1e-3
"""A step is steady if it changes the live bytes by at most this fraction of the bytes before.

The fraction is not 0, because Opacus keeps a few kilobytes of norms after the first step.
"""

MOST_STEPS = 3

Counted = tuple[tuple[OperatorCount, ...], dict[str, int], int]
"""Counts of a step: operators, peak live bytes by phase, bytes of the largest tensor."""


@dataclass(frozen=True)
class Logical(Instrument):
    """An instrument that counts a step of a case without a GPU, and without allocating tensors.

    The instrument counts the first steady step. A step is steady if the live bytes before and
    after the step are equal, up to the fraction `STEADY`. A first step is often not steady, because
    the optimizer allocates state. Steps after the first steady step are assumed to be equal. If
    none of `MOST_STEPS` steps is steady, the last step is counted and a note is added.

    With Poisson sampling, batches have different sizes. The instrument then also counts a step of
    each sampled size. The counts by operator come from the steady step, whose batch has the
    expected size.

    For a case of several ranks, the first rank is counted (see `one_rank`), in its second step or
    later. In the first step PyTorch runs additional operators on whole tensors to find how the
    tensors are sharded.

    A case is counted in a new process if one of its classes is not built in, because foreign code
    may crash or hang. A new process is also used if this process is in a process group of
    ``torch.distributed``, or if this process has not imported torch and a fork server can start.

    Attributes:
        timeout: limit in seconds for the new process, as in `CaseProcess`.
        directory: directory for the log of the new process, or None to write no log. A case whose
            classes are all built in writes no log.
        active: number of Poisson batches to count.
    """

    name: ClassVar[str] = "logical"
    hardware: ClassVar[bool] = False
    by_rank: ClassVar[bool] = True

    timeout: float = 600.0
    directory: Path | None = None
    active: int = Settings.active

    @classmethod
    def from_settings(cls, settings: Settings) -> Logical:
        return cls(settings.timeout, settings.ncu_dir, settings.active)

    def start(self, case: Case) -> PendingMeasurement:
        """Start a new process, or return a measurement that counts in this process later."""
        if (
            is_builtin(case)
            and not _in_process_group()
            and ("torch" in sys.modules or not fork_server())
        ):
            return Counting(self, case)
        directory = None if is_builtin(case) else self.directory
        log = directory and (directory / case.report_path).with_suffix(".logical.log")
        return CaseProcess(Task(case, self), log=log, timeout=self.timeout)

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return LogicalRecorder(steps)

    def record_case(self, case: Case) -> Outcome:
        faulthandler.enable(2)  # after a crash, the log contains a stack
        return self.count(case)

    def count(self, case: Case) -> Outcome:
        """Count a case in this process.

        The notes of the outcome include assumed values of tensors. Operators of unknown libraries
        are counted by their schema. The notes list the unknown operators that move few bytes.
        Tables list the unknown operators that move many bytes.
        """
        from dpbench.child.build import about_sizes, labels_of
        from dpbench.instruments.logical.counter import logical_rows

        counter, labels, steps = self.counted(case, labels_of)
        rows = [
            row
            for repeat, (counted, peaks, largest) in enumerate(steps[1:] or steps)
            for row in logical_rows(case, counted, peaks, peaks, repeat, largest)
        ]
        operators = tuple(steps[0][0])
        light = {each.operator for each in operators if each.general_rule}
        light -= guesses(operators).keys()
        notes = [f"{note} ({times}×)" for note, times in sorted(counter.notes.items())]
        notes += [f"{name} was counted by its schema" for name in sorted(light)]
        if case.sampling != "fixed":
            notes.append(about_sizes(case, self.active))
        if case.gpus > 1:
            notes.append(f"counted: one rank of {case.gpus}")
        return Outcome(
            case, tuple(rows), operators=tuple(operators), notes=tuple(notes), labels=labels
        )

    def counted(
        self, case: Case, read: Callable[[TrainerBase], T]
    ) -> tuple[OperatorCounter, T, list[Counted]]:
        """Count a case, and return the counter, the result of ``read(trainer)``, and the counts.

        Raises:
            CaseFailed: building the case or a step raises an error.
        """
        from dpbench.instruments.logical.counter import without_data
        from dpbench.instruments.logical.one_rank import fake_process_group

        try:
            with (
                untouched_torch(),
                freeze_existing_objects(),
                fake_process_group(case.gpus),
                without_data() as counter,
            ):
                trainer, steps = self._run(case, counter)
                return counter, read(trainer), steps
        except DpbenchError:
            raise
        except Exception as error:  # a trainer may raise any error
            raise CaseFailed(
                f"{case.id}: counting logical bytes failed with {_in_one_line(error)}"
            ) from error

    def _run(self, case: Case, counter: OperatorCounter) -> tuple[TrainerBase, list[Counted]]:
        """Train until a step is steady, and return the trainer and the counts.

        The first counts are the counts of the steady step, or of the last step if no step is
        steady. With Poisson sampling, the counts of each sampled step follow.
        """
        import torch

        from dpbench.child.build import build
        from dpbench.instruments.logical.as_on_cuda import untraced
        from dpbench.workloads.base import examples_in

        sampled = 0 if case.sampling == "fixed" else self.active
        batches: Sequence[Any]
        trainer, batches = build(case, torch.device("cpu"), MOST_STEPS + sampled, sampled=sampled)

        def counted(batch: Any) -> Counted:
            with untraced(), observed_step(counter):
                trainer.train_step(batch)
            return counter.operators, dict(counter.peaks), counter.memory.largest

        after = live_bytes(counter)
        for number, batch in enumerate(batches[:MOST_STEPS]):
            before = after
            steps = [counted(batch)]
            after = live_bytes(counter)
            steady = abs(after - before) <= STEADY * before
            if steady and number >= (case.gpus > 1):
                break
        else:
            note = f"no step was steady: step {MOST_STEPS} added {after - before:,} bytes to memory"
            counter.notes[note] = 1
        if sampled:
            notes, by_size = counter.notes.copy(), dict[int, Counted]()
            sizes = [examples_in(batch) for batch in batches[MOST_STEPS:]]
            for size, batch in zip(sizes, batches[MOST_STEPS:], strict=True):
                by_size[size] = by_size.get(size) or counted(batch)
                notes |= counter.notes
            counter.notes = notes
            steps += [by_size[size] for size in sizes]
        return trainer, steps


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


def _in_one_line(error: Exception) -> str:
    """Return the class and message of an error, and the line of user code that raised the error."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}{own_line(error.__traceback__)}"


def live_bytes(counter: OperatorCounter) -> int:
    """Return the live bytes between two steps, after collecting reference cycles."""
    gc.collect()
    return counter.memory.now


@contextmanager
def untouched_torch() -> Iterator[None]:
    """Use PyTorch's default dtype, device and modes within the block.

    At the end of the block, the user's settings are restored.
    """
    import torch
    from torch._subclasses import fake_tensor

    with (
        ExitStack() as stack,
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        warnings.catch_warnings(),
    ):
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        # dpbench reports errors in one line, so PyTorch must not log their tracebacks.
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))
        if torch.get_default_device().type != "cpu":  # a default device slows each operator
            stack.enter_context(torch.device("cpu"))
        # Opacus's fast gradient clipping deep-copies gradients, which reads addresses of gradients.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Opacus registers full backward hooks on embeddings, whose inputs need no gradients.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        # FSDP2 warns about each returned view, but the view matters only if it is modified.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        torch.set_default_dtype(torch.float32)
        yield
