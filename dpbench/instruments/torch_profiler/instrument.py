"""Time, memory and copies by phase and operator, through the PyTorch profiler.

The case runs once more, in a process of its own and never under Nsight Compute. Hardware
counters say how many bytes moved; this says which operators launched what, and how much copies
and memsets moved, which kernel-by-kernel counting misses.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from dpbench.case import Case
from dpbench.instruments.base import Instrument, check_place
from dpbench.instruments.child import Child, step_command
from dpbench.instruments.recorder import Recorder
from dpbench.instruments.torch_profiler.files import INSTRUMENT, read_rows
from dpbench.process.messages import Schedule
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class TorchProfiler(Instrument):
    """Runs ``dpbench step --profile``."""

    name: ClassVar[str] = INSTRUMENT
    subjects: ClassVar[tuple[str, ...]] = ("case", "script")

    directory: Path = Settings.profile_dir  # gets a folder a case; TensorBoard's log directory
    device: str = "cuda"  # or cpu
    schedule: Schedule = Schedule()
    threshold: float = Settings.profile_threshold  # ms of a step that make a bottleneck
    timeout: float = Settings.timeout  # seconds after which a case is ended

    @classmethod
    def from_settings(cls, settings: Settings) -> TorchProfiler:
        return cls(
            settings.profile_dir,
            settings.device,
            Schedule.parse(settings.profile_schedule),
            settings.profile_threshold,
            settings.timeout,
        )

    def check(self) -> None:
        check_place(self.directory, on_gpu=self.device == "cuda")
        if find_spec("tensorboard") is None:
            print(
                "dpbench: no TensorBoard log: pip install 'dpbench[tensorboard]'", file=sys.stderr
            )

    def command(self, case: Case) -> list[str]:
        return [
            *step_command(case, device=self.device),
            *("--profile", str(self.directory / case.file_name)),
            *("--profile-schedule", str(self.schedule)),
            *("--profile-threshold", f"{self.threshold:g}"),
        ]

    def start(self, case: Case) -> Child:
        log = self.directory / case.file_name / "step.log"
        return Child(self.command(case), case=case, log=log, timeout=self.timeout, read=self.read)

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.torch_profiler.recorder import ProfileRecorder

        return ProfileRecorder(self.directory / case.file_name, steps)

    def check_script(self) -> None:
        check_place(self.directory, on_gpu=False)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are times, memory and copies, by phase and for the step."""
        process.record()
        return read_rows(self.directory / process.case.file_name)
