"""An instrument that is a recorder: one in the process of a case, of a script, or of a test."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dpbench.case import Case
from dpbench.instruments.base import Instrument, check_place
from dpbench.instruments.child import Child, step_command
from dpbench.instruments.recorder import Recorder
from dpbench.options import own_arguments
from dpbench.process.messages import Steps
from dpbench.registry import INSTRUMENTS
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Recorded(Instrument):
    """Runs ``dpbench step``, whose steps its `recorder` hears."""

    directory: Path  # where the cases' logs go
    device: str = "cuda"  # or cpu
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout  # seconds after which a case is ended

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        steps = Steps(settings.warmup, settings.active)
        usual = (settings.ncu_dir, settings.device, steps, settings.timeout)
        return cls(*usual, **settings.own_of(cls))

    def check(self) -> None:
        check_place(self.directory, on_gpu=self.device == "cuda")

    def check_script(self) -> None:
        """It leaves no files of a script's."""

    @abstractmethod
    def recorder(self, case: Case, steps: int | None = None) -> Recorder: ...

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        named = INSTRUMENTS.argument(INSTRUMENTS.canonical(type(self)))
        step = step_command(case, self.steps, device=self.device)
        return [*step, "--instrument", named, *own_arguments(self)]

    def start(self, case: Case) -> Child:
        log = (self.directory / case.report_path).with_suffix(f".{self.name}.log")
        return Child(self.command(case), case=case, log=log, timeout=self.timeout, read=self.read)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are those that the recorder made."""
        outcome = Outcome.from_json(process.record()["outcome"])
        process.operators, process.notes = outcome.operators, outcome.notes
        return list(outcome.rows)
