"""Steps under the PyTorch profiler: traces, operators and memory of some of them.

Never under Nsight Compute: both want the GPU's one profiling interface.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import OUTSIDE, Case
from dpbench.instruments.interface import InstrumentError
from dpbench.instruments.recorder import Recorder, Silent, device_and_torch, on_cuda
from dpbench.instruments.torch_profiler import profile_folder
from dpbench.process.messages import Schedule
from dpbench.results.rows import Measurement
from dpbench.training.phases import PhaseListener

if TYPE_CHECKING:
    from torch.profiler import profile


class PhaseAnnotations:
    """Marks each phase in the trace.

    The device is not stopped at the borders, because a launch belongs to the phase in which the
    CPU made it; so does an allocation.
    """

    def __init__(self) -> None:
        from torch.profiler import record_function

        self.record_function = record_function

    def start_step(self, phase: str = OUTSIDE) -> None:
        self.annotation: Any = self.record_function(f"dpbench.{phase}")
        self.annotation.__enter__()

    def switch(self, phase: str) -> None:
        self.end_step()
        self.start_step(phase)

    def end_step(self) -> None:
        self.annotation.__exit__(None, None, None)


class ProfileRecorder(Recorder):
    """Time, memory and copies by phase and operator, of a script's steps.

    The profiler is started and stopped around each step that counts, so that nothing else, such
    as an evaluation after the last of them, is in its sums. Writes into ``directory``, for each
    step N, ``trace_N.json.gz`` (Chrome trace) and ``operators_N.json`` (sums by operator and by
    input shape).
    """

    quick = False

    def __init__(self, directory: Path, wanted: int | None = None) -> None:
        super().__init__(wanted)
        self.directory = directory.absolute()  # a script may change its own

    @cached_property
    def listener(self) -> PhaseListener:
        profile_folder.prepare(self.directory)
        return PhaseAnnotations()

    def start_step(self) -> None:
        import torch

        if torch._C._autograd._profiler_enabled():
            raise InstrumentError("the script runs the PyTorch profiler itself; there is only one")
        self._profiler = profiler_of(on_cuda())
        self._profiler.start()
        self.held.callback(self._stop)
        super().start_step()

    def end_step(self) -> None:
        super().end_step()
        self.close()
        save(self._profiler, self.directory, self.heard - 1)

    def _stop(self) -> None:
        if on_cuda():  # what still runs belongs to this step
            import torch

            torch.cuda.synchronize()
        self._profiler.stop()

    def record(self, case: Case) -> dict[str, Any]:
        return device_and_torch() | {"schedule": {"active": 1, "repeat": self.heard}}

    def rows(self, case: Case) -> list[Measurement]:
        return profile_folder.write_summary(case, self.record(case), self.directory).rows


class ScheduledRecorder(ProfileRecorder):
    """The same of a case's steps, of which a schedule says what becomes of them.

    A cycle of the schedule is one trace. On CUDA there is ``memory_snapshot.pickle``, too, taken
    in one more step after the others, because recording the stack of each allocation slows a step
    down.
    """

    hears_warmup = True

    def __init__(self, directory: Path, schedule: Schedule) -> None:
        from torch.profiler import schedule as planned

        super().__init__(directory, schedule.steps)
        self.schedule, self._planned = schedule, planned(**asdict(schedule))
        self._cycles = count()

    def prepare(self) -> None:
        profile_folder.prepare(self.directory)

    def start_step(self) -> None:
        import torch

        if self.heard == 0:
            self.wanted = self.schedule.steps + on_cuda()
            self._profiler = self.held.enter_context(
                profiler_of(on_cuda(), schedule=self._planned, on_trace_ready=self._save_cycle)
            )
        elif self.heard == self.schedule.steps:
            # A step of the 1b model allocates and frees some 15 000 times.
            torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
            self.held.callback(torch.cuda.memory._record_memory_history, enabled=None)
        recorded = self._planned(self.heard).name.startswith("RECORD")  # or RECORD_AND_SAVE
        self.listener = PhaseAnnotations() if recorded else Silent()
        Recorder.start_step(self)

    def end_step(self) -> None:
        import torch

        self.listener.end_step()
        if self.heard == self.schedule.steps:
            torch.cuda.memory._dump_snapshot(str(self.directory / profile_folder.SNAPSHOT))
        else:
            if on_cuda():  # or what still runs would count as the next step's
                torch.cuda.synchronize()
            self._profiler.step()
        self.heard += 1
        if self.heard >= self.schedule.steps:  # the profiler ends before the snapshot begins
            self.close()

    def record(self, case: Case) -> dict[str, Any]:
        return {"schedule": asdict(self.schedule)}

    def _save_cycle(self, profiler: profile) -> None:
        save(profiler, self.directory, next(self._cycles))


def profiler_of(on_cuda: bool, **options: Any) -> profile:
    """The profiler that records what `save` writes."""
    from torch.profiler import ProfilerActivity, profile

    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_cuda],
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        **options,
    )


def save(profiler: profile, directory: Path, cycle: int) -> None:
    """Write the trace and the operators of one cycle."""
    profiler.export_chrome_trace(str(directory / f"trace_{cycle}.json.gz"))
    operators = json.dumps(_operators(profiler))
    (directory / f"operators_{cycle}.json").write_text(operators, encoding="utf-8")


def _operators(profiler: profile) -> list[dict[str, Any]]:
    """Sums over the recorded steps of a cycle: once by name, once by name and input shapes."""
    return [
        {
            "name": event.key,
            "kind": _kind(event),
            "input_shapes": str(event.input_shapes) if by_shape else None,
            "calls": event.count,
            "self_cpu_seconds": event.self_cpu_time_total / 1e6,
            "cpu_seconds": event.cpu_time_total / 1e6,
            "self_device_seconds": event.self_device_time_total / 1e6,
            "device_seconds": event.device_time_total / 1e6,
            "self_cpu_memory_bytes": event.self_cpu_memory_usage,
            "self_device_memory_bytes": event.self_device_memory_usage,
            "flops": event.flops,
        }
        for by_shape in (False, True)
        for event in profiler.key_averages(group_by_input_shape=by_shape)
    ]


def _kind(event: Any) -> str:
    if event.is_user_annotation:
        return "annotation"
    return "operator" if event.device_type.name == "CPU" else "kernel"
