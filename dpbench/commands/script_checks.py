"""Instrument of ``dpbench exec --verify``, which checks the steps of a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpbench.core.errors import ConfigurationError
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement

if TYPE_CHECKING:
    from dpbench.child.recorder import Recorder


@dataclass(frozen=True)
class ScriptChecks(Instrument):
    """Checks the steps of a script instead of measuring them."""

    name: ClassVar[str] = "verify"

    def check_ranks(self, why: str) -> None:
        raise ConfigurationError(
            f"--verify checks only one process, but {why}: start a single process"
        )

    def start(self, case: Subject) -> PendingMeasurement:
        raise NotImplementedError  # this instrument checks only scripts

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        from dpbench.verify.recorder import CheckingRecorder

        return CheckingRecorder(steps)
