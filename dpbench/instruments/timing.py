"""The instrument ``timing`` measures step time, throughput and peak memory without a profiler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from dpbench.child.recorder import Recorder, device_and_torch, on_cuda
from dpbench.core.gpu import clock_reader
from dpbench.core.metrics import unit
from dpbench.core.subject import Subject
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.results.rows import STEP, Measurement

if TYPE_CHECKING:
    from dpbench.child.case import PhaseTimes


@dataclass(frozen=True)
class Timing(InProcessInstrument):
    """An instrument that times the phases of a step, and needs no profiler."""

    name: ClassVar[str] = "timing"

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return TimingRecorder(steps)


class TimingRecorder(Recorder):
    """Records the seconds of each phase and, on a GPU, the peak memory and the clocks.

    On a GPU, CUDA events measure the seconds. Clocks are read between steps, and only the last
    wanted step is waited for. So the clocks of a step are those at the end of the first step at
    whose end the GPU has finished it.

    Attributes:
        clocks: for each step that the GPU has finished, what `clock_reader` reads.
    """

    peak: int | None = None  # bytes; None on the CPU, and until the recorder is closed

    @cached_property
    def listener(self) -> PhaseTimes:
        import torch

        from dpbench.child.case import PhaseTimes

        times = PhaseTimes(torch.device("cuda" if on_cuda() else "cpu"))
        self.clocks: list[dict[str, float]] = []
        if times.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._read = clock_reader(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return times

    def end_step(self) -> None:
        super().end_step()
        self._read_clocks()

    def _read_clocks(self, *, wait: bool = False) -> None:
        if number := self.listener.newly_finished(wait=wait):
            self.clocks += [self._read()] * number

    def close(self) -> None:
        if self.observed and self.peak is None:
            self._read_clocks(wait=self.finished)  # an idle GPU lowers its clocks
            self.peak = self._peak()  # before the script allocates more
        super().close()

    def _peak(self) -> int | None:
        from dpbench.child.case import peak_memory

        return peak_memory() if self.listener.on_cuda else None

    @property
    def median_seconds(self) -> float:
        """Median duration of the timed steps, in seconds."""
        return median(sum(step.values()) for step in self.listener.seconds())

    def details(self) -> dict[str, Any]:
        seconds = self.listener.seconds(wait=self.wait)[: self.observed]
        self._read_clocks()
        return {
            "phase_seconds": seconds,
            "clocks": self.clocks[: len(seconds)],
            "ranges": self.listener.ranges,
            "peak_memory_bytes": self._peak() if self.peak is None else self.peak,
        }

    def rows(self, case: Subject) -> list[Measurement]:
        return timing_rows(case, {**device_and_torch(), **self.details()}, self.sizes)


def timing_rows(
    case: Subject, details: Mapping[str, Any], sizes: Sequence[int] = ()
) -> list[Measurement]:
    """Return rows of the time of each phase and step, samples per second, clocks and peak memory.

    A run on the CPU has no row of clocks or peak memory.

    Args:
        case: the case, script or function.
        details: the details of a `TimingRecorder`, and the device and the version of torch.
        sizes: the sizes of the batches, if they differ.
    """
    values: list[tuple[str, str, float, int]] = []
    for repeat, seconds in enumerate(details["phase_seconds"]):
        total = sum(seconds.values())
        values += [(phase, "step_time_seconds", t, repeat) for phase, t in seconds.items()]
        values.append((STEP, "step_time_seconds", total, repeat))
        # For a script, `case.gpus` is 0, and `case.batch_size` is 0 if the size is unknown.
        if case.batch_size and not sizes:
            ranks = case.gpus or int(os.environ.get("WORLD_SIZE", 1))
            values.append((STEP, "samples_per_second", case.batch_size / ranks / total, repeat))
    if sizes:
        rate = sum(sizes) / sum(total for phase, _, total, _ in values if phase == STEP)
        values.append((STEP, "samples_per_second", rate, 0))
    for repeat, clocks in enumerate(details.get("clocks", ())):
        values += [(STEP, metric, value, repeat) for metric, value in clocks.items()]
    if details["peak_memory_bytes"] is not None:
        values.append((STEP, "peak_memory_bytes", details["peak_memory_bytes"], 0))
    where = details["device"], f"torch {details['torch']}"
    return [
        Measurement(case, Timing.name, phase, metric, value, unit(metric), repeat, *where)
        for phase, metric, value, repeat in values
    ]
