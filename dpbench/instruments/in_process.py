"""The base class of instruments whose recorder runs in the process that trains."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.child.messages import Steps
from dpbench.child.recorder import Recorder
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.files import check_writable
from dpbench.core.gpu import require_gpu
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import CaseProcess
from dpbench.results.outcome import Outcome


@dataclass(frozen=True)
class InProcessInstrument(Instrument):
    """An instrument that measures a case in a new process, with a `recorder` for each rank.

    Attributes:
        leaves_files: whether the instrument writes files in addition to a log.
        directory: directory of logs and reports.
        device: ``cuda`` or ``cpu``.
        steps: number of warm-up steps and number of measured (active) steps.
        timeout: time limit of a case in seconds (see `CaseProcess`).
    """

    by_rank: ClassVar[bool] = True
    leaves_files: ClassVar[bool] = False

    directory: Path
    device: str = "cuda"
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        usual: dict[str, Any] = {
            "directory": settings.ncu_dir,
            "device": "cuda" if cls.needs_gpu else settings.device,
            "steps": Steps(settings.warmup, settings.active),
            "timeout": settings.timeout,
        }
        return cls(**usual | settings.own_of(cls) | chosen)

    def check(self) -> None:
        if self.device == "cuda":
            require_gpu()
        if self.leaves_files:
            check_writable(self.directory)

    @abstractmethod
    def recorder(self, case: Subject, steps: int | None = None) -> Recorder: ...

    def log(self, case: Subject) -> Path:
        """Return the path of the file that receives the output of a case's process."""
        return (self.directory / case.report_path).with_suffix(f".{self.name}.log")

    def start(self, case: Case) -> CaseProcess:
        before, log, limit = self.profiler_command(case), self.log(case), self.timeout
        read = self.read_report
        return CaseProcess(Task(case, self), before, log=log, timeout=limit, complete=read)

    def record_case(self, case: Case) -> Outcome:
        from dpbench.child.case import run_case  # imports torch

        recorder = self.recorder(case, self.steps.active)
        return run_case(case, recorder, device=self.device, **asdict(self.steps))
