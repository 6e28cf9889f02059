"""Instruments whose numbers come from a recorder in the process of a case, script or test."""

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
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import CaseProcess
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement


@dataclass(frozen=True)
class InProcessInstrument(Instrument):
    """Runs ``dpbench step``, whose steps its `recorder` hears: one in each rank."""

    by_rank: ClassVar[bool] = True
    leaves_files: ClassVar[bool] = False  # beside a log, which is kept where it can be written

    directory: Path  # where the cases' logs and reports go
    device: str = "cuda"  # or cpu
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout  # seconds after which a case is ended

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
        """Nothing to check: recording a script's steps leaves no files."""

    @abstractmethod
    def recorder(self, case: Case, steps: int | None = None) -> Recorder: ...

    # --- in the process that starts that of a case -----------------------------------------------

    def log(self, case: Case) -> Path:
        """Where the output of a case's process goes."""
        return (self.directory / case.report_path).with_suffix(f".{self.name}.log")

    def before_case(self, case: Case) -> list[str]:
        """The program that starts a case's process, and its arguments; none by default."""
        return []

    def start(self, case: Case) -> CaseProcess:
        log = self.log(case)
        before = self.before_case(case)
        return CaseProcess(Task(case, self), before, log=log, timeout=self.timeout, read=self.read)

    def read(self, process: CaseProcess) -> list[Measurement]:
        """Wait for a process; its rows are those that the recorder of each rank made."""
        record = process.record()
        ranks = record.get("ranks", [record])
        return [
            replace(row, rank=rank)
            for rank, each in enumerate(ranks)
            for row in self.rows_of(process, each)
        ]

    def rows_of(self, process: CaseProcess, record: dict[str, Any]) -> Iterable[Measurement]:
        """The rows of one rank's record."""
        outcome = Outcome.from_json(record["outcome"])
        process.operators = process.operators or outcome.operators  # of ranks, the first's
        process.notes = [*dict.fromkeys((*process.notes, *outcome.notes))]
        return outcome.rows

    # --- in the process of a case ----------------------------------------------------------------

    def case_recorder(self, case: Case) -> Recorder:
        """The recorder of the steps of a case, which are all alike."""
        recorder = self.recorder(case, self.steps.active)
        recorder.wanted = recorder.wanted or self.steps.active  # an end, if it wants all there are
        return recorder

    def observe(self, case: Case) -> dict[str, Any]:
        from dpbench.child.step import run_case

        return run_case(case, self.case_recorder(case), device=self.device, **asdict(self.steps))
