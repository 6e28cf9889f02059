"""The instrument ``torch_profiler`` measures time, memory and copies by phase and operator.

The case runs in a new process without Nsight Compute. The profile shows which operator launched
each kernel, and the bytes of copies and memsets. Nsight Compute does not count copies and
memsets in kernel replay.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.child.messages import Schedule, Steps
from dpbench.child.recorder import NullListener, Recorder, device_and_torch, on_cuda
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, InstrumentError
from dpbench.core.settings import Settings, option
from dpbench.core.subject import Subject
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.instruments.torch_profiler import profile_folder
from dpbench.instruments.torch_profiler.profile_folder import INSTRUMENT, own_folder
from dpbench.results.rows import Measurement
from dpbench.training.phases import PhaseListener


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


class ProfileRecorder(Recorder):
    """Records time, memory and copies of a script's steps, by phase and operator.

    The profiler runs only within the counted steps, so that sums exclude other work such as an
    evaluation.

    Args:
        directory: folder of the Chrome traces ``trace_N.json.gz``, where N is the number of the
            step, and of ``operators.txt``, which describes the last step.
        wanted: number of steps to record. If None, all steps are recorded.
        threshold: operators that take at least this many milliseconds per step are bottlenecks.
    """

    quick = False

    def __init__(
        self, directory: Path, wanted: int | None = None, *, threshold: float = 0.0
    ) -> None:
        super().__init__(wanted)
        self.directory = directory.absolute()  # since a script may change the working directory
        self.threshold = threshold
        self.cycles = 0  # number of written traces

    @cached_property
    def profiling(self) -> Any:
        """The module `profiling`, which imports torch."""
        from dpbench.instruments.torch_profiler import profiling

        return profiling

    @cached_property
    def listener(self) -> PhaseListener:
        profile_folder.prepare(self.directory)
        annotations: PhaseListener = self.profiling.PhaseAnnotations()
        return annotations

    def start_step(self) -> None:
        if self.profiling.is_running():
            raise InstrumentError(
                "the script itself runs the PyTorch profiler, which cannot run twice: remove the "
                "profiler from the script, or choose another instrument"
            )
        self._profiler = self.profiling.profiler_of(on_cuda())
        self._profiler.start()
        self.held.callback(self._stop)
        super().start_step()

    def end_step(self) -> None:
        super().end_step()
        self.close()
        self._save(self._profiler)

    def _stop(self) -> None:
        self.profiling.finish_work(on_cuda())
        self._profiler.stop()

    def _save(self, profiler: Any) -> None:
        """Write the trace of one cycle of steps, and store the sums by operator over the cycle."""
        profiler.export_chrome_trace(str(self.directory / f"trace_{self.cycles}.json.gz"))
        self._by_name, self._by_shape = profiler.key_averages(), profiler.key_averages(True)
        self.cycles += 1

    def rows(self, case: Subject) -> list[Measurement]:
        """Return the rows of all traces, and write the operator tables.

        If TensorBoard is installed, a TensorBoard log is also written.
        """
        paths = [self.directory / f"trace_{cycle}.json.gz" for cycle in range(self.cycles)]
        traces = [profile_folder.read_trace(path) for path in paths]
        tables: str = self.profiling.operator_tables(
            self._by_name,
            self._by_shape,
            calls=traces[-1].calls,
            steps=len(traces[-1].cpu_seconds),
            threshold=self.threshold,
        )
        (self.directory / profile_folder.OPERATORS).write_text(tables, encoding="utf-8")
        rows = list(profile_folder.profile_rows(case, device_and_torch(), traces))
        if find_spec("tensorboard") is not None:
            profile_folder.write_log(case, rows, self.directory)
        return rows


class ScheduledRecorder(ProfileRecorder):
    """Records time, memory and copies of the steps of a case that a schedule selects.

    Each cycle of the schedule writes one trace. On a GPU, one more step follows the cycles, for
    which ``memory_snapshot.pickle`` is written. The snapshot needs a separate step, because
    recording the stack of each allocation slows the step.
    """

    hears_warmup = True

    def __init__(self, directory: Path, schedule: Schedule, *, threshold: float = 0.0) -> None:
        super().__init__(directory, schedule.steps, threshold=threshold)
        self.schedule = schedule

    def prepare(self) -> None:
        profile_folder.prepare(self.directory)

    def start_step(self) -> None:
        if self.observed == 0:
            self.wanted = self.schedule.steps + on_cuda()
            self._planned = self.profiling.schedule(**asdict(self.schedule))
            options = {"schedule": self._planned, "on_trace_ready": self._save}
            self._profiler = self.held.enter_context(
                self.profiling.profiler_of(on_cuda(), **options)
            )
        elif self.observed == self.schedule.steps:
            self.held.callback(self.profiling.record_allocations())
        recorded = self._planned(self.observed).name.startswith("RECORD")
        self.listener = self.profiling.PhaseAnnotations() if recorded else NullListener()
        Recorder.start_step(self)

    def end_step(self) -> None:
        self.listener.end_step()
        if self.observed == self.schedule.steps:
            self.profiling.write_snapshot(self.directory / profile_folder.SNAPSHOT)
        else:
            self.profiling.finish_work(on_cuda())
            self._profiler.step()
        self.observed += 1
        if self.observed >= self.schedule.steps:
            self.close()  # the profiler must not run during the snapshot

    def details(self) -> dict[str, Any]:
        return {"schedule": asdict(self.schedule)}
