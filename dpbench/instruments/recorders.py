"""What hears the steps of a running loop, and makes rows of them: one class an instrument.

They work in the process that trains, on its own tensors and devices.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from dpbench.case import ALL_PHASES, Case
from dpbench.errors import unknown
from dpbench.instruments.base import InstrumentError
from dpbench.metrics import unit
from dpbench.results.kernels import OperatorCount
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement

if TYPE_CHECKING:
    from dpbench.instruments.cupti.steps import StepCounter
    from dpbench.instruments.logical.counter import Count, RunningCounter
    from dpbench.process.step import NvtxRanges, PhaseTimes


class Recorder(ABC):
    """A `dpbench.process.script.StepRecorder`: hears steps, and makes rows of those that ended.

    Args:
        wanted: how many steps it hears; None for as many as there are.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.heard = 0

    @property
    def finished(self) -> bool:
        """See `StepRecorder`."""
        return self.wanted is not None and self.heard >= self.wanted

    @abstractmethod
    def start_step(self) -> None:
        """See `PhaseListener`."""

    @abstractmethod
    def switch(self, phase: str) -> None:
        """See `PhaseListener`."""

    def end_step(self) -> None:
        """See `PhaseListener`."""
        self.heard += 1

    @abstractmethod
    def rows(self, case: Case) -> list[Measurement]:
        """What was heard of the steps that are over."""

    @property
    def operators(self) -> Sequence[OperatorCount]:
        """What each operator did in the last step, if it sees operators."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """What was assumed."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Give back what it holds."""

    def forked(self) -> None:  # noqa: B027
        """See `StepRecorder`."""


class TimingRecorder(Recorder):
    """Seconds by phase; on CUDA from events, and the most memory that was handed out."""

    name: ClassVar[str] = "timing"

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        self._times: PhaseTimes | None = None
        self._peak: int | None = None

    def start_step(self) -> None:
        if self._times is None:
            import torch

            from dpbench.process.step import PhaseTimes

            self._times = PhaseTimes(torch.device("cuda" if on_cuda() else "cpu"))
            if self._times.on_cuda:
                torch.cuda.reset_peak_memory_stats()
        self._times.start_step()

    def switch(self, phase: str) -> None:
        if self._times:
            self._times.switch(phase)

    def end_step(self) -> None:
        if self._times:
            self._times.end_step()
            if self._times.on_cuda:  # now: the script may go on
                import torch

                self._peak = torch.cuda.max_memory_allocated()
        super().end_step()

    def record(self) -> dict[str, Any]:
        """What `timing_rows` takes."""
        if self._times is None:
            return {"device": "cpu", "torch": "", "phase_seconds": [], "peak_memory_bytes": None}
        import torch

        seconds = self._times.seconds()[: self.heard]
        return {
            "device": torch.cuda.get_device_name() if self._times.on_cuda else "cpu",
            "torch": torch.__version__,
            "phase_seconds": seconds,
            "peak_memory_bytes": self._peak,
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
        self._counter: RunningCounter | None = None
        self._steps: list[tuple[dict[tuple[str, str], Count], dict[str, int]]] = []
        self._counting = False
        self._notes: dict[str, int] = {}

    def start_step(self) -> None:
        from dpbench.instruments.logical.counter import RunningCounter

        if not self._counting:
            self._counter = self._counter or RunningCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]
            self._counting = True
        assert self._counter
        self._counter.start_step()

    def switch(self, phase: str) -> None:
        if self._counter:
            self._counter.switch(phase)

    def end_step(self) -> None:
        super().end_step()
        if self._counter:
            self._counter.end_step()
            self._steps.append((self._counter.counts, self._counter.peaks))
            for note, times in self._counter.notes.items():
                self._notes[note] = self._notes.get(note, 0) + times
        if self.finished:
            self.close()

    def rows(self, case: Case) -> list[Measurement]:
        return [row for repeat in range(self.heard) for row in self._rows(case, repeat)]

    def _rows(self, case: Case, repeat: int) -> Iterator[Measurement]:
        import torch

        counts, phases = self._steps[repeat]
        tool = f"torch {torch.__version__}"
        for phase in (*(phase for phase in ALL_PHASES if phase in phases), STEP):
            of_phase = [count for (where, _), count in counts.items() if phase in (where, STEP)]
            for metric, value in (
                ("logical_read_bytes", sum(count.read_bytes for count in of_phase)),
                ("logical_write_bytes", sum(count.write_bytes for count in of_phase)),
                ("flops", sum(count.flops for count in of_phase)),
            ):
                where = (unit(metric), repeat, NO_HARDWARE, tool)
                yield Measurement(case, self.name, phase, metric, value, *where)

    @property
    def operators(self) -> Sequence[OperatorCount]:
        if not (self._steps and self._counter):
            return ()
        guessed = self._counter.by_general_rule
        found = [
            OperatorCount(*where, **asdict(count), general_rule=where[1] in guessed)
            for where, count in self._steps[-1][0].items()
        ]
        return sorted(found, key=lambda count: -count.total_bytes)

    @property
    def notes(self) -> Sequence[str]:
        said = [f"{note} ({times}×)" for note, times in sorted(self._notes.items())]
        if self._steps:
            where = "CUDA" if on_cuda() else "the CPU"
            said.append(f"operators were counted as they ran on {where}")
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo and dynamo.counters["frames"]["total"]:
            said.append("PyTorch used nothing that torch.compile had made in this process")
        return said

    def close(self) -> None:
        if self._counting and self._counter:
            self._counting = False
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def forked(self) -> None:
        self.close()


class CuptiRecorder(TimingRecorder):
    """Times of steps without counters; after these, as many counted ones as it takes.

    The steps of a script need not be alike, so only that is counted which one pass is enough for
    on Hopper and newer chips: bytes of DRAM and how busy the GPU was. As many steps are counted by
    phase as are timed, and as many as a whole, whose busy shares no synchronization disturbs.
    """

    name: ClassVar[str] = "cupti"

    def __init__(self, wanted: int | None = None) -> None:
        self.timed = 5 if wanted is None else wanted
        super().__init__(3 * self.timed)
        self._counter: StepCounter | None = None

    @property
    def _counts(self) -> bool:
        return self.heard >= self.timed

    def start_step(self) -> None:
        if not self._counts:
            super().start_step()
            return
        if self._counter is None:
            from dpbench.instruments.cupti.steps import StepCounter, Target

            rounds = [True] * self.timed + [False] * self.timed
            self._target = Target.of_torch()
            self._counter = StepCounter((), self._target, rounds)
            self.wanted = self.timed + self._counter.steps
        self._counter.start_step()

    def switch(self, phase: str) -> None:
        if not self._counts:
            super().switch(phase)
        elif self._counter:
            self._counter.switch(phase)

    def end_step(self) -> None:
        if not self._counts:
            super().end_step()
            return
        if self._counter:
            self._counter.end_step()
        self.heard += 1

    def rows(self, case: Case) -> list[Measurement]:
        from dpbench.instruments.cupti.instrument import counted_rows, cupti_rows

        record = self.record() | {"cupti": "", "counted_phases": {}, "counted_steps": []}
        if self._times and record["device"] == "cpu":
            raise InstrumentError("cupti counts what a GPU does, and the steps ran on the CPU")
        steps = []
        if self._counter:  # older chips need two passes, and so steps that are alike
            one_pass = self._counter.passes == 1
            steps = self._counter.each() if one_pass else self._counter.rounds()
            record["cupti"] = "{}.{}".format(*self._target.library.cuda_version)
        by_phase = [step for step in steps if STEP not in step]
        whole = [step for step in steps if STEP in step]
        counted = [
            (phase, values, repeat)
            for alike in (by_phase, whole)
            for repeat, step in enumerate(alike)
            for phase, values in step.items()
        ]
        return [*cupti_rows(case, record), *counted_rows(case, record, counted)]

    def close(self) -> None:
        if self._counter:
            self._counter.close()


class NvtxRecorder(Recorder):
    """Marks phases as ranges for Nsight Compute, whose report has the numbers."""

    name: ClassVar[str] = "ncu"

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        self._ranges: NvtxRanges | None = None

    def start_step(self) -> None:
        from dpbench.process.step import NvtxRanges

        self._ranges = self._ranges or NvtxRanges()
        self._ranges.start_step()

    def switch(self, phase: str) -> None:
        if self._ranges:
            self._ranges.switch(phase)

    def end_step(self) -> None:
        super().end_step()
        if self._ranges:
            self._ranges.end_step()
        if self.finished:
            self.close()

    def rows(self, case: Case) -> list[Measurement]:
        return []

    def close(self) -> None:
        if self._ranges:
            self._ranges.finish()
            self._ranges = None


RECORDERS: dict[str, type[Recorder]] = {
    recorder.name: recorder for recorder in (TimingRecorder, LogicalRecorder, CuptiRecorder)
}
"""Those whose numbers the process that trains has itself, by instrument."""


def recorder(
    instrument: str,
    wanted: int | None = None,
    known: Mapping[str, type[Recorder]] = RECORDERS,
) -> Recorder:
    """The recorder of an instrument, by its name."""
    if instrument not in known:
        raise unknown("instrument for running training", instrument, known)
    return known[instrument](wanted)


def on_cuda() -> bool:
    """Whether this process uses a GPU."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())
