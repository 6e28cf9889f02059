"""A step of the caller's own, a function without arguments, taken in the caller's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from dpbench.case import Case
from dpbench.errors import own_line
from dpbench.instruments.base import CaseFailed, Instrument, Running
from dpbench.instruments.recorders import RECORDERS, on_cuda, recorder
from dpbench.process.schedule import Steps
from dpbench.process.script import StepFinder
from dpbench.process.watched import watch
from dpbench.results.rows import Measurement


@dataclass(frozen=True, eq=False)
class OwnStep(Instrument):
    """Takes a step again and again, and hears it as an instrument hears a script's.

    Args:
        name: of the instrument, one of `RECORDERS`.
        step: does one training step; its phases are found, or said by `dpbench.phase`.
        steps: those that come before, and those that count.
    """

    name: str  # type: ignore[misc]
    step: Callable[[], object]
    steps: Steps

    @property
    def hardware(self) -> bool:  # type: ignore[override]
        """See `Instrument`."""
        return RECORDERS[self.name].hardware

    def start(self, case: Case) -> Running:
        return OwnSteps(self, case)


@dataclass(eq=False)
class OwnSteps(Running):
    """The steps, which are taken once their rows are asked for."""

    instrument: OwnStep
    case: Case

    def rows(self) -> list[Measurement]:
        import torch

        from dpbench.process.step import alone

        steps = self.instrument.steps
        heard = recorder(self.instrument.name, steps.active)
        finder = StepFinder(heard, skip=steps.warmup, by_hand=True)
        with ExitStack() as held:
            held.enter_context(alone(torch.device("cuda" if on_cuda() else "cpu"), self.case.id))
            held.callback(heard.close)
            held.callback(finder.close)
            watch(finder)
            while not heard.finished:
                self._take(finder)
        if self.instrument.name == "logical" and not heard.operators:
            raise CaseFailed(
                f"{self.case.id}: the function did nothing that could be counted: it must take one "
                f"training step each time it is called"
            )
        self.operators = heard.operators
        self.notes = [*heard.notes, *finder.notes]
        return heard.rows(self.case)

    def _take(self, finder: StepFinder) -> None:
        finder.begin_step()
        try:
            self.instrument.step()
        except Exception as error:
            finder.give_up_step()
            where = own_line(error.__traceback__)
            what = f"{type(error).__name__}: {error}"
            raise CaseFailed(f"{self.case.id}: {what}{where and f' ({where})'}") from error
        finder.end_step()
        if finder.failure:
            raise finder.failure
