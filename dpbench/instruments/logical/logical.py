"""The instrument ``logical``: bytes that a step must move, counted by operator without a GPU.

The real trainers run on tensors without data. `counter` sees their operators, and `rules` says how
many bytes each must move.

Logical bytes are a floor for executions that keep nothing in caches between operators. On an H200
they are within a few percent of DRAM counters if tensors are larger than the L2 cache. Long
sequences move more, because large matrix products read operands again; tiny models move less,
because everything stays in the cache.
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

from dpbench.child.failures import CaseFailed
from dpbench.child.recorder import Recorder
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError, own_line
from dpbench.core.registry import is_builtin
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.instruments.logical.recorder import LogicalRecorder, new_objects_collected
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.fork_server import fork_server
from dpbench.launch.pending import PendingMeasurement
from dpbench.results.kernels import OperatorCount, guesses
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.training.phases import observed_step

if TYPE_CHECKING:
    from dpbench.instruments.logical.counter import OperatorCounter
    from dpbench.training.base import TrainerBase

T = TypeVar("T")

STEADY = 1e-3
"""A step is steady if it changes the live bytes by at most this share. Opacus keeps a few kilobytes
of norms from the first step on."""

MOST_STEPS = 3

Counted = tuple[tuple[OperatorCount, ...], dict[str, int], int]
"""The counts of one step: operators, peak live bytes by phase, bytes of the largest tensor."""


@dataclass(frozen=True)
class Logical(Instrument):
    """Counts one step of a case; needs neither a GPU nor the case's memory.

    The first steady step is counted: the first that leaves as many live bytes as it found, within
    `STEADY`. Earlier steps are warm-up, in which optimizers allocate state. Later steps would be
    equal. With Poisson batches they are not, so a step of each sampled size is counted too; the
    operators are those of the steady step, which has the expected size. If none of `MOST_STEPS`
    steps is steady, the last is counted, with a note.

    For a case of several ranks, the first rank is counted (see `one_rank`), in its second step or
    later: in the first step PyTorch runs operators on whole tensors to learn how they are sharded.

    A case is counted in a new process if its trainer or model is not dpbench's own, because it may
    crash or hang; if this process is in a process group; or if this process has not imported torch
    and a fork server has.
    """

    name: ClassVar[str] = "logical"
    hardware: ClassVar[bool] = False
    by_rank: ClassVar[bool] = True

    timeout: float = 600.0  # seconds; a process that takes longer is ended
    directory: Path | None = None  # of the process's log; None keeps no log
    active: int = Settings.active  # Poisson batches that are counted

    @classmethod
    def from_settings(cls, settings: Settings) -> Logical:
        return cls(settings.timeout, settings.ncu_dir, settings.active)

    def start(self, case: Case) -> PendingMeasurement:
        """Start a process, or return an object that counts here when its rows are asked for."""
        if (
            is_builtin(case)
            and not _in_process_group()
            and ("torch" in sys.modules or not fork_server())
        ):
            return Counting(self, case)
        kept = None if is_builtin(case) else self.directory  # a built-in case leaves no log
        log = kept and (kept / case.report_path).with_suffix(".logical.log")
        return CaseProcess(Task(case, self), log=log, timeout=self.timeout, read=_read_outcome)

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return LogicalRecorder(steps)

    def check_script(self) -> None:
        """Check nothing: it leaves no files."""

    def record_case(self, case: Case) -> dict[str, Any]:
        faulthandler.enable(2)  # the log then says where a crash was
        return self.count(case).as_json()

    def count(self, case: Case) -> Outcome:
        """Count a case in this process, or raise `CaseFailed`.

        Notes name assumed values, and operators of few bytes that were counted by their schema.
        Tables name such operators of many bytes.
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
        notes += [f"{name}: counted by its schema" for name in sorted(light)]
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
        """Count a case; return the counter, the result of ``read(trainer)``, and the counts.

        Raises:
            CaseFailed: a step fails.
        """
        from dpbench.instruments.logical.counter import without_data
        from dpbench.instruments.logical.one_rank import fake_process_group

        try:
            with (
                untouched_torch(),
                new_objects_collected(),
                fake_process_group(case.gpus),
                without_data() as counter,
            ):
                trainer, steps = self._run(case, counter)
                return counter, read(trainer), steps
        except DpbenchError:
            raise
        except Exception as error:  # a trainer can raise anything
            raise CaseFailed(
                f"{case.id}: counting logical bytes failed with {_in_one_line(error)}"
            ) from error

    def _run(self, case: Case, counter: OperatorCounter) -> tuple[TrainerBase, list[Counted]]:
        """Train until a step is steady; return the trainer, and what was counted.

        That is the steady step and, of Poisson batches, each of the sampled steps.
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
            counter.notes[f"step {MOST_STEPS} still added {after - before:,} B to what lives"] = 1
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
    """A case that this process counts when its rows are asked for."""

    instrument: Logical
    case: Case

    def rows(self) -> list[Measurement]:
        counted = self.instrument.count(self.case)
        self.operators, self.notes = counted.operators, counted.notes
        self.labels = counted.labels
        return list(counted.rows)


def _in_process_group() -> bool:
    """Whether this process is in a process group, which a count must not replace."""
    torch = sys.modules.get("torch")
    distributed = torch and torch.distributed
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _read_outcome(child: CaseProcess) -> list[Measurement]:
    counted = Outcome.from_json(child.record())
    child.operators, child.notes = counted.operators, counted.notes
    return list(counted.rows)


def _in_one_line(error: Exception) -> str:
    """The error's class and message, and the user's line that raised it."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}{own_line(error.__traceback__)}"


def live_bytes(counter: OperatorCounter) -> int:
    """Live bytes between two steps, after garbage collection of reference cycles."""
    gc.collect()
    return counter.memory.now


@contextmanager
def untouched_torch() -> Iterator[None]:
    """Set PyTorch's defaults within this context, and restore the settings afterwards."""
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
        # Errors are reported in one line; do not log their tracebacks.
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))
        if torch.get_default_device().type != "cpu":  # only then: it costs a call per operator
            stack.enter_context(torch.device("cpu"))
        # Opacus's fast gradient clipping deep-copies gradients, which reads their address.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Opacus puts full backward hooks on embeddings, whose inputs never need gradients.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        # FSDP2 gathers again anyway, unless the view is changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        torch.set_default_dtype(torch.float32)
        yield
