"""Records traces, operators and memory of steps with the PyTorch profiler.

The PyTorch profiler and Nsight Compute cannot run together, because they need the same interface
of the GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpbench.child.messages import Schedule
from dpbench.child.recorder import NullListener, Recorder, device_and_torch, on_cuda
from dpbench.core.errors import InstrumentError
from dpbench.core.subject import Subject
from dpbench.instruments.torch_profiler import profile_folder
from dpbench.results.rows import Measurement
from dpbench.training.phases import PhaseListener


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
