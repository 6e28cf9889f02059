"""The base class of instruments whose recorder runs in the process that trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
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
from dpbench.results.rows import Measurement


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

    def check_script(self) -> None:
        """Do nothing. Instruments that write files for a script override this method."""

    @abstractmethod
    def recorder(self, case: Subject, steps: int | None = None) -> Recorder: ...

    # --- in the parent process -------------------------------------------------------------------

    def log(self, case: Subject) -> Path:
        """Return the path of the file that receives the output of a case's process."""
        return (self.directory / case.report_path).with_suffix(f".{self.name}.log")

    def profiler_command(self, case: Subject) -> list[str]:
        """Return the command line of the profiler that runs the case, or [] without a profiler."""
        return []

    def start(self, case: Case) -> CaseProcess:
        log = self.log(case)
        before = self.profiler_command(case)
        return CaseProcess(Task(case, self), before, log=log, timeout=self.timeout, read=self.read)

    def read(self, process: CaseProcess) -> list[Measurement]:
        """Wait for the process of a case, and return the rows of all ranks."""
        record = process.record()
        ranks = record.get("ranks", [record])
        return [
            replace(row, rank=rank)
            for rank, each in enumerate(ranks)
            for row in self.rows_of(process, each)
        ]

    def rows_of(self, process: CaseProcess, record: dict[str, Any]) -> Iterable[Measurement]:
        """Make rows from the record of one rank."""
        outcome = Outcome.from_json(record["outcome"])
        process.operators = process.operators or outcome.operators  # keep the counts of rank 0
        process.notes = [*dict.fromkeys((*process.notes, *outcome.notes))]
        return outcome.rows

    # --- in the process that trains --------------------------------------------------------------

    def case_recorder(self, case: Case) -> Recorder:
        """Return a recorder that records at least the active steps of a case."""
        recorder = self.recorder(case, self.steps.active)
        recorder.wanted = recorder.wanted or self.steps.active
        return recorder

    def record_case(self, case: Case) -> dict[str, Any]:
        from dpbench.child.case import run_case

        return run_case(case, self.case_recorder(case), device=self.device, **asdict(self.steps))
