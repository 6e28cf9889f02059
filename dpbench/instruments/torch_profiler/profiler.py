"""The instrument ``torch_profiler`` measures time, memory and copies by phase and operator.

The case runs in a new process without Nsight Compute. The profile shows which operator launched
each kernel, and the bytes of copies and memsets. Nsight Compute does not count copies and
memsets in kernel replay.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.child.messages import Schedule, Steps
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.settings import Settings, option
from dpbench.core.subject import Subject
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.instruments.torch_profiler.profile_folder import INSTRUMENT, own_folder
from dpbench.instruments.torch_profiler.recorder import ProfileRecorder, ScheduledRecorder


@dataclass(frozen=True)
class ProfilerOptions:
    """Command-line options of the instrument ``torch_profiler``."""

    profile_dir: Path = option(
        "directory for files of the PyTorch profiler; each case has a folder in it",
        Path("runs"),
        metavar="DIR",
    )
    profile_schedule: str = option(
        "numbers of steps that the PyTorch profiler skips first, waits, warms up and records in "
        "each cycle, and number of cycles",
        str(Schedule()),
        metavar="NAME=N,…",
    )
    profile_threshold: float = option(
        "list operators that take at least this many milliseconds per step", 10.0, metavar="MS"
    )

    def __post_init__(self) -> None:
        Schedule.parse(self.profile_schedule)
        if not (threshold := self.profile_threshold) >= 0:
            raise ConfigurationError(f"the threshold must be >= 0 ms, not {threshold:g}")


@dataclass(frozen=True)
class TorchProfiler(InProcessInstrument):
    """An instrument that records steps of a case or a script with the PyTorch profiler.

    Attributes:
        directory: directory of the profiles; each case has a folder in it.
        schedule: which steps of a case are recorded.
        threshold: operators that take at least this many milliseconds per step are bottlenecks.
    """

    name: ClassVar[str] = INSTRUMENT
    subjects: ClassVar[tuple[str, ...]] = ("case", "script")
    leaves_files: ClassVar[bool] = True
    options: ClassVar[type | None] = ProfilerOptions
    directory: Path = ProfilerOptions.profile_dir
    schedule: Schedule = Schedule()
    threshold: float = ProfilerOptions.profile_threshold

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        asked = settings.of(ProfilerOptions)
        schedule = Schedule.parse(asked.profile_schedule)
        own: dict[str, Any] = {
            "directory": asked.profile_dir,
            "steps": Steps(schedule.steps - schedule.active, schedule.active),
            "schedule": schedule,
            "threshold": asked.profile_threshold,
        }
        return super().from_settings(settings, **own | chosen)

    def check(self) -> None:
        super().check()
        if find_spec("tensorboard") is None:
            print("dpbench: no TensorBoard log: pip install tensorboard", file=sys.stderr)

    def log(self, case: Subject) -> Path:
        return self.directory / case.file_name / "step.log"

    def recorder(self, case: Subject, steps: int | None = None) -> ProfileRecorder:
        folder = own_folder(self.directory / case.file_name)
        if isinstance(case, Case):
            return ScheduledRecorder(folder, self.schedule, threshold=self.threshold)
        return ProfileRecorder(folder, steps, threshold=self.threshold)
