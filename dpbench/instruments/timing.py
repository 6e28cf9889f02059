"""Step time, throughput and peak memory, from a process that no profiler slows down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.case import Case
from dpbench.instruments.base import Instrument, check_place
from dpbench.instruments.child import Child, step_command
from dpbench.metrics import unit
from dpbench.process.messages import Steps
from dpbench.results.rows import STEP, Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Timing(Instrument):
    """Runs ``dpbench step`` by itself."""

    name: ClassVar[str] = "timing"

    directory: Path  # where the cases' logs go
    device: str = "cuda"  # or cpu
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout  # seconds after which a case is ended

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        steps = Steps(settings.warmup, settings.active)
        return cls(settings.ncu_dir, settings.device, steps, settings.timeout)

    def check(self) -> None:
        check_place(self.directory, on_gpu=self.device == "cuda")

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        return step_command(case, self.steps, device=self.device)

    def start(self, case: Case) -> Child:
        log = (self.directory / case.report_path).with_suffix(f".{self.name}.log")
        return Child(self.command(case), case=case, log=log, timeout=self.timeout, read=self.read)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are times by phase, samples per second, peak memory."""
        return timing_rows(process.case, process.record())


def timing_rows(case: Case, record: dict[str, Any]) -> list[Measurement]:
    """The rows of one record of ``dpbench step``."""
    values: list[tuple[str, str, float, int]] = []
    for repeat, seconds in enumerate(record["phase_seconds"]):
        total = sum(seconds.values())
        values += [(phase, "step_time_seconds", t, repeat) for phase, t in seconds.items()]
        values.append((STEP, "step_time_seconds", total, repeat))
        if case.batch_size:  # a script's may be unknown
            values.append((STEP, "samples_per_second", case.batch_size / total, repeat))
    if record["peak_memory_bytes"] is not None:
        values.append((STEP, "peak_memory_bytes", record["peak_memory_bytes"], 0))
    where = record["device"], f"torch {record['torch']}"
    return [
        Measurement(case, Timing.name, phase, metric, value, unit(metric), repeat, *where)
        for phase, metric, value, repeat in values
    ]
