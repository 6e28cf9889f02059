"""Logical bytes: what a step must move, counted operator by operator without a GPU.

The real trainers run on tensors without data. `rules` says how many bytes an operator must move,
`counter` watches the operators go by; here is the instrument.

Logical bytes are the floor of an execution that keeps nothing between two operators. On an
H200 they come within a few percent of the DRAM counters where tensors are larger than the L2
cache; longer sequences move more than the floor (large matrix products read their operands
again), tiny models less (everything stays in the cache).
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from dpbench.child.failures import CaseFailed
from dpbench.child.recorder import Recorder
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError, own_line
from dpbench.core.registry import is_builtin
from dpbench.core.settings import Settings
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.fork_server import fork_server
from dpbench.launch.pending import PendingMeasurement
from dpbench.results.kernels import guesses
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.training.phases import observed_step

if TYPE_CHECKING:
    from dpbench.instruments.logical.counter import ByteCounter

STEADY = 1e-3
"""A step is steady if it changes the number of bytes alive by at most this share. Opacus keeps each
example's norms from the first step on, a few kilobytes."""

MOST_STEPS = 3


@dataclass(frozen=True)
class Logical(Instrument):
    """Counts one step of a case; needs neither a GPU nor the case's memory.

    The first steady step is counted: one that leaves as many bytes alive as it found, within
    `STEADY`. Steps before it are warm-up, in which an optimizer makes its state. Without data all
    steps after it would be equal. If none of `MOST_STEPS` steps is steady, the last is counted, and
    a note says so.

    Of a case with several ranks the first rank is counted (see `one_rank`), in its second step or
    later: in the first, PyTorch runs operators on whole tensors to learn how they are sharded. It
    is counted in a process of its own if this one is in a process group.

    Trainers and models that are not dpbench's own are counted in a process of their own, because
    they can crash it or run forever. So are dpbench's own where this process has not imported torch
    and there is a fork server.
    """

    name: ClassVar[str] = "logical"
    hardware: ClassVar[bool] = False
    by_rank: ClassVar[bool] = True

    timeout: float = 600.0  # seconds that such a process may take
    directory: Path | None = None  # where its log goes, if it is kept

    @classmethod
    def from_settings(cls, settings: Settings) -> Logical:
        return cls(timeout=settings.timeout, directory=settings.ncu_dir)

    def start(self, case: Case) -> PendingMeasurement:
        """See `Instrument.start`; in this process, nothing runs until the rows are asked for."""
        if is_builtin(case) and not _grouped() and ("torch" in sys.modules or not fork_server()):
            return Counting(self, case)
        kept = None if is_builtin(case) else self.directory  # as there is none of one counted here
        log = kept and (kept / case.report_path).with_suffix(".logical.log")
        return CaseProcess(Task(case, self), log=log, timeout=self.timeout, read=_counted_apart)

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.logical.recorder import LogicalRecorder

        return LogicalRecorder(steps)

    def check_script(self) -> None:
        """It leaves no files of a script's."""

    def observe(self, case: Case) -> dict[str, Any]:
        faulthandler.enable(2)  # what crashes in here is in the log, with its line
        return self.count(case).as_json()

    def count(self, case: Case) -> Outcome:
        """Count a case in this process; a step that cannot be counted is a `CaseFailed`.

        Its notes are what was assumed about values that do not exist without data, and which
        operators' bytes are a guess; the heavy ones are left to the tables, which name them.
        """
        from dpbench.instruments.logical.counter import logical_rows, without_data
        from dpbench.instruments.logical.one_rank import fake_process_group

        try:
            with (
                untouched_torch(),
                new_objects_collected(),
                fake_process_group(case.gpus),
                without_data() as counter,
            ):
                labels = self._run(case, counter)
        except DpbenchError:
            raise
        except Exception as error:  # whatever an outside trainer can raise
            raise CaseFailed(
                f"{case.id}: counting logical bytes failed with {_in_one_line(error)}"
            ) from error
        operators = counter.operators
        peaks, largest = counter.peaks, counter.memory.largest
        rows = logical_rows(case, operators, peaks, peaks, largest=largest)
        light = {each.operator for each in operators if each.general_rule}
        light -= guesses(operators).keys()
        notes = [f"{note} ({times}×)" for note, times in sorted(counter.notes.items())]
        notes += [f"{name}: counted by its schema" for name in sorted(light)]
        if case.gpus > 1:
            notes.append(f"counted: one rank of {case.gpus}")
        return Outcome(case, tuple(rows), operators=operators, notes=tuple(notes), labels=labels)

    def _run(self, case: Case, counter: ByteCounter) -> dict[str, str]:
        """Train until a step is like the one before; returns the trainer's labels."""
        import torch

        from dpbench.child.build import build, labels_of
        from dpbench.instruments.logical.as_on_cuda import untraced

        trainer, batches = build(case, torch.device("cpu"), MOST_STEPS)
        after = alive(counter)
        for number, batch in enumerate(batches):
            before = after
            with untraced(), observed_step(counter):
                trainer.train_step(batch)
            after = alive(counter)
            steady = abs(after - before) <= STEADY * before
            if steady and number >= (case.gpus > 1):
                break
        else:
            counter.notes[f"step {MOST_STEPS} still added {after - before:,} B to what lives"] = 1
        return labels_of(trainer)


@dataclass(eq=False)
class Counting(PendingMeasurement):
    """A case that is counted in this process once its rows are asked for."""

    instrument: Logical
    case: Case

    def rows(self) -> list[Measurement]:
        counted = self.instrument.count(self.case)
        self.operators, self.notes = counted.operators, counted.notes
        self.labels = counted.labels
        return list(counted.rows)


def _grouped() -> bool:
    """Whether this process is one of a process group, which a count must not replace."""
    torch = sys.modules.get("torch")
    distributed = torch and torch.distributed
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _counted_apart(child: CaseProcess) -> list[Measurement]:
    counted = Outcome.from_json(child.record())
    child.operators, child.notes = counted.operators, counted.notes
    return list(counted.rows)


def _in_one_line(error: Exception) -> str:
    """An error's name and words, and the user's line that it came from."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}{own_line(error.__traceback__)}"


def alive(counter: ByteCounter) -> int:
    """Bytes in use between two steps, without what only reference cycles keep."""
    gc.collect()
    return counter.memory.now


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Let the garbage collector skip old objects: PyTorch's take it as long as counting a case."""
    if gc.get_freeze_count():  # someone else has frozen objects, and thawing would thaw theirs
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def untouched_torch() -> Iterator[None]:
    """Set PyTorch's defaults, and restore afterwards what was set before."""
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
        # It would log the traceback of an error that is reported in one line.
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))
        if torch.get_default_device().type != "cpu":  # costs a call for each operator
            stack.enter_context(torch.device("cpu"))
        # Opacus's fast gradient clipping deep-copies gradients, and copying looks at the address.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Opacus puts full backward hooks on embeddings, whose inputs never need gradients.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        # A module's view is gathered again all the same, unless it is changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        torch.set_default_dtype(torch.float32)
        yield
