"""What hears the steps of a running loop, and makes rows of them: one class an instrument.

They work in the process that trains, on its own tensors and devices.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpbench.case import OUTSIDE, Case
from dpbench.errors import unknown
from dpbench.instruments.base import InstrumentError
from dpbench.process.script import StepRecorder
from dpbench.results.kernels import OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.settings import Settings

if TYPE_CHECKING:
    from dpbench.instruments.cupti.steps import StepCounter
    from dpbench.instruments.logical.counter import RunningCounter
    from dpbench.process.profiled import PhaseAnnotations
    from dpbench.process.step import NvtxRanges, PhaseTimes
    from dpbench.training.phases import PhaseListener


class Recorder(StepRecorder):
    """Hears the steps of a loop, whoever runs it, and makes rows of those that ended."""

    name: ClassVar[str]
    hardware: ClassVar[bool] = True
    quick: ClassVar[bool] = True  # rows can be made after each step

    wait = True  # for the GPU, when rows are made; else of the steps that are over there
    directory: Path = Settings.profile_dir  # where it leaves files, if it does
    operators: Sequence[OperatorCount] = ()  # in the last step, if it sees operators
    notes: Sequence[str] = ()  # what was assumed

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted  # how many steps; None for as many as there are
        self.heard = 0
        self.phases: list[set[str]] = []  # of each step that has begun
        self.held = ExitStack()  # what it holds of this process

    @property
    def finished(self) -> bool:
        return self.wanted is not None and self.heard >= self.wanted

    @cached_property
    @abstractmethod
    def listener(self) -> PhaseListener:
        """What is told of steps and phases; made when the first begins, and its device is known."""

    def start_step(self) -> None:
        self.listener.start_step()
        self.phases.append({OUTSIDE})

    def switch(self, phase: str) -> None:
        self.listener.switch(phase)
        self.phases[-1].add(phase)

    def end_step(self) -> None:
        self.listener.end_step()
        self.heard += 1
        if self.finished:
            self.close()

    @abstractmethod
    def rows(self, case: Case) -> list[Measurement]:
        """What was heard of the steps that are over, of which there is one at least."""

    def outcome(self, case: Case) -> Outcome:
        """What became of the steps, as of those of a case."""
        rows = tuple(self.rows(case)) if self.heard else ()
        came = Counter(phase for step in self.phases[: self.heard] for phase in step)
        some = [
            f"{phase} came in {times} of {self.heard} steps"
            for phase, times in sorted(came.items())
            if times < self.heard
        ]
        return Outcome(case, rows, operators=tuple(self.operators), notes=(*self.notes, *some))

    def close(self) -> None:
        """Let go of what it holds of this process: modes, counters."""
        self.held.close()

    def forked(self) -> None:
        return  # counters and ranges are the parent's


class TimingRecorder(Recorder):
    """Seconds by phase; on CUDA from events, and the most memory that was in use."""

    name: ClassVar[str] = "timing"
    peak: int | None = None

    @cached_property
    def listener(self) -> PhaseTimes:
        import torch

        from dpbench.process.step import PhaseTimes

        times = PhaseTimes(torch.device("cuda" if on_cuda() else "cpu"))
        if times.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        return times

    def end_step(self) -> None:
        super().end_step()
        if self.listener.on_cuda:  # now: the script may go on
            from dpbench.process.step import peak_memory

            self.peak = peak_memory()

    def record(self) -> dict[str, Any]:
        """What `timing_rows` takes."""
        import torch

        return {
            "device": torch.cuda.get_device_name() if self.listener.on_cuda else "cpu",
            "torch": torch.__version__,
            "phase_seconds": self.listener.seconds(wait=self.wait)[: self.heard],
            "peak_memory_bytes": self.peak,
        }

    def rows(self, case: Case) -> list[Measurement]:
        from dpbench.instruments.timing import timing_rows

        return timing_rows(case, self.record())


class LogicalRecorder(Recorder):
    """Bytes that the operators of each step must read and write, and their arithmetic."""

    name: ClassVar[str] = "logical"
    hardware: ClassVar[bool] = False

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        self._steps: list[tuple[Sequence[OperatorCount], Sequence[str]]] = []  # and their phases
        self._assumed = Counter[str]()

    @cached_property
    def listener(self) -> RunningCounter:
        from dpbench.instruments.logical.counter import RunningCounter

        counter = RunningCounter()
        self.held.enter_context(counter)
        return counter

    def end_step(self) -> None:
        super().end_step()
        self.operators = self.listener.operators
        self._steps.append((self.operators, [*self.listener.peaks]))
        self._assumed.update(self.listener.notes)
        self.notes = [f"{note} ({times}×)" for note, times in sorted(self._assumed.items())]
        where = "CUDA" if on_cuda() else "the CPU"
        self.notes.append(f"operators were counted as they ran on {where}")
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo and dynamo.counters["frames"]["total"]:
            self.notes.append("PyTorch used nothing that torch.compile had made in this process")

    def rows(self, case: Case) -> list[Measurement]:
        from dpbench.instruments.logical.counter import logical_rows

        return [
            row
            for repeat, step in enumerate(self._steps)
            for row in logical_rows(case, *step, repeat=repeat)
        ]

    def forked(self) -> None:
        self.close()


class CuptiRecorder(Recorder):
    """Times of steps without counters; after these, as many counted ones as it takes.

    The steps of a script need not be alike, so only that is counted which one pass is enough for
    on Hopper and newer chips: bytes of DRAM and how busy the GPU was. As many steps are counted by
    phase as are timed, and as many as a whole, whose busy shares no synchronization disturbs.
    """

    name: ClassVar[str] = "cupti"

    def __init__(self, wanted: int | None = None) -> None:
        timed = 5 if wanted is None else wanted
        super().__init__(3 * timed)
        self.timing = TimingRecorder(timed)
        self._by_phase = [True] * timed + [False] * timed
        self._counter: StepCounter | None = None

    @cached_property
    def listener(self) -> PhaseListener:
        return self.timing

    def start_step(self) -> None:
        if self.timing.finished and self._counter is None:
            from dpbench.instruments.cupti.steps import StepCounter, Target, enough_ranges

            self._target = Target.of_torch()
            most = enough_ranges(self.timing.listener.ranges)
            self.listener = self._counter = StepCounter((), self._target, self._by_phase, most)
            self.held.callback(self._counter.close)
            self.wanted = self.timing.heard + self._counter.steps
        super().start_step()

    def rows(self, case: Case) -> list[Measurement]:
        from dpbench.instruments.cupti.instrument import cupti_rows

        self.timing.wait = self.wait
        record = self.timing.record() | {"cupti": "", "counted": []}
        if record["device"] == "cpu":
            raise InstrumentError("cupti counts what a GPU does, and the steps ran on the CPU")
        if self._counter:  # older chips need two passes, and so steps that are alike
            record["counted"] = self._counter.rounds()
            record["cupti"] = "{}.{}".format(*self._target.library.cuda_version)
        return list(cupti_rows(case, record))


class NvtxRecorder(Recorder):
    """Marks phases as ranges for Nsight Compute, whose report has the numbers."""

    name: ClassVar[str] = "ncu"

    @cached_property
    def listener(self) -> NvtxRanges:
        from dpbench.process.step import NvtxRanges

        ranges = NvtxRanges()
        self.held.callback(self._finish)
        return ranges

    def _finish(self) -> None:
        if self.listener.step >= self.heard:  # the script ended in a step, as its loader did
            self.listener.end_step()
        self.listener.finish()

    def rows(self, case: Case) -> list[Measurement]:
        return []


class ProfileRecorder(Recorder):
    """Time, memory and copies by phase and operator, as of a case.

    The profiler is started and stopped around each step that counts, so that nothing else, such
    as an evaluation after the last of them, is in its sums.
    """

    name: ClassVar[str] = "torch_profiler"
    quick: ClassVar[bool] = False

    @cached_property
    def listener(self) -> PhaseAnnotations:
        from dpbench.instruments.torch_profiler.files import prepare
        from dpbench.process.profiled import PhaseAnnotations

        prepare(self.directory)
        return PhaseAnnotations()

    def start_step(self) -> None:
        import torch

        from dpbench.process.profiled import profiler_of

        if torch._C._autograd._profiler_enabled():
            raise InstrumentError("the script runs the PyTorch profiler itself; there is only one")
        self._profiler = profiler_of(on_cuda())
        self._profiler.start()
        self.held.callback(self._stop)
        super().start_step()

    def end_step(self) -> None:
        from dpbench.process.profiled import save

        super().end_step()
        self.close()
        save(self._profiler, self.directory, self.heard - 1)

    def rows(self, case: Case) -> list[Measurement]:
        import torch

        from dpbench.instruments.torch_profiler.files import write_summary

        record: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if on_cuda() else "cpu",
            "torch": torch.__version__,
            "schedule": {"active": 1, "repeat": self.heard},
        }
        return write_summary(case, record, self.directory).rows

    def _stop(self) -> None:
        if on_cuda():  # what still runs belongs to this step
            import torch

            torch.cuda.synchronize()
        self._profiler.stop()


RECORDERS: dict[str, type[Recorder]] = {
    recorder.name: recorder for recorder in (TimingRecorder, LogicalRecorder, CuptiRecorder)
}
"""Those whose numbers the process that trains has itself, by instrument."""

OF_SCRIPTS: dict[str, type[Recorder]] = RECORDERS | {
    recorder.name: recorder for recorder in (NvtxRecorder, ProfileRecorder)
}
"""Those of a script, whose process a tool may have started, by instrument."""


def recorder_of(instrument: str, known: Mapping[str, type[Recorder]]) -> type[Recorder]:
    """The recorder of an instrument, by its name."""
    if instrument not in known:
        raise unknown("instrument for running training", instrument, known)
    return known[instrument]


def on_cuda() -> bool:
    """Whether this process uses a GPU."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())
