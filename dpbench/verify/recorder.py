"""Checks the steps of a script while the script runs. Imports torch only at the first step."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpbench.child.recorder import Recorder
from dpbench.core.subject import Subject

if TYPE_CHECKING:
    from dpbench.verify.script_record import StepRecord


class CheckingRecorder(Recorder):
    """Checks a script's steps. `rows` returns no rows, and `details` the checks."""

    quick = False

    @cached_property
    def calls(self) -> StepRecord:  # type: ignore[override]
        import torch

        from dpbench.verify.script_record import StepRecord

        # Nothing is compiled, because repeating calls with one example would compile them again.
        self.held.enter_context(torch.compiler.set_stance("force_eager"))
        return StepRecord()

    def start_step(self) -> None:
        if not self.phases:
            self.held.enter_context(self.calls.influences)
        super().start_step()

    def forked(self) -> None:
        self.calls.influences.is_paused = True
        super().forked()

    def end_step(self) -> None:
        self.calls.end_step()
        super().end_step()

    def rows(self, case: Subject) -> list[Any]:
        return []

    def details(self) -> dict[str, Any]:
        from dpbench.verify.script import check_steps

        with self.calls.influences.paused():
            return {"checks": [asdict(check) for check in check_steps(self.calls)]}
