"""Step time, throughput and peak memory, from a process that no profiler slows down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.instruments import child
from dpbench.instruments.base import Instrument, check_place
from dpbench.process.schedule import Steps
from dpbench.results.rows import STEP, Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Timing(Instrument):
    """Runs ``dpbench step`` by itself.

    Args:
        directory: where the cases' logs go.
        device: ``cuda`` or ``cpu``.
        steps: warm-up and active steps.
        timeout: seconds after which a case is ended.
    """

    name: ClassVar[str] = "timing"

    directory: Path
    device: str = "cuda"
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout

    @classmethod
    def from_settings(cls, settings: Settings) -> Timing:
        """As ``--warmup``, ``--active`` and the like say."""
        steps = Steps(settings.warmup, settings.active)
        return cls(settings.ncu_dir, settings.device, steps, settings.timeout)

    def check(self) -> None:
        """There are the device and a directory that can hold logs."""
        check_place(self.directory, on_gpu=self.device == "cuda")

    def start(self, case: Case) -> child.Child:
        """Start a process whose rows are times by phase, samples per second, peak memory."""
        return child.Child(
            child.step_command(case, self.steps, device=self.device),
            case=case,
            log=(self.directory / case.report_path).with_suffix(".timing.log"),
            timeout=self.timeout,
            read=lambda process: timing_rows(case, process.record()),
        )


def timing_rows(case: Case, record: dict[str, Any]) -> list[Measurement]:
    """The rows of one record of ``dpbench step``."""

    def row(phase: str, metric: str, value: float, unit: str, repeat: int) -> Measurement:
        tool = f"torch {record['torch']}"
        return Measurement(
            case, Timing.name, phase, metric, value, unit, repeat, record["device"], tool
        )

    rows: list[Measurement] = []
    for repeat, seconds in enumerate(record["phase_seconds"]):
        for phase, value in seconds.items():
            rows.append(row(phase, "step_time_seconds", value, "s", repeat))
        total = sum(seconds.values())
        rows.append(row(STEP, "step_time_seconds", total, "s", repeat))
        rows.append(row(STEP, "samples_per_second", case.batch_size / total, "1/s", repeat))
    if record["peak_memory_bytes"] is not None:
        rows.append(row(STEP, "peak_memory_bytes", record["peak_memory_bytes"], "B", 0))
    return rows
