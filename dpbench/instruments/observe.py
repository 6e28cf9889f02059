"""Measures the steps of a user's loop or function, in the process that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from dpbench.child.failures import CaseFailed
from dpbench.child.imported import imported_files
from dpbench.child.messages import Steps
from dpbench.child.other_threads import watch_threads_and_forks
from dpbench.child.patches import watch
from dpbench.child.recorder import Recorder, on_cuda
from dpbench.child.step_finder import StepFinder
from dpbench.core.errors import ConfigurationError, own_line
from dpbench.core.settings import Settings
from dpbench.core.subject import Script, Subject
from dpbench.instruments import choose
from dpbench.instruments.interface import Instrument, InstrumentWrapper
from dpbench.launch.pending import PendingMeasurement
from dpbench.results.outcome import Outcome
from dpbench.results.report import CaseReport
from dpbench.results.rows import Measurement


class Observation:
    """What `observe` yields: it marks steps and makes the report."""

    def __init__(self, case: Subject, recorder: Recorder, finder: StepFinder) -> None:
        self.case, self.recorder, self.finder = case, recorder, finder

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one training step. Its phases are found, or marked with `dpbench.phase`."""
        finder = self.finder
        finder.start_step()
        try:
            yield
        except BaseException as error:
            finder.give_up_step()
            finder.notes.append(f"{type(error).__name__} ended step {finder.steps}: not counted")
            raise
        finder.end_step()
        if finder.failure:
            raise finder.failure

    @property
    def report(self) -> CaseReport:
        """The report of the steps so far, like that of a fixture."""
        if not self.recorder.observed:
            raise ConfigurationError(
                f"{self.case.id}: no step was observed: put `with seen.step():` around each, and "
                f"take more steps than are skipped"
            )
        return CaseReport.of_outcome(self.outcome)

    @property
    def outcome(self) -> Outcome:
        """Rows and notes of the steps so far."""
        outcome = self.recorder.outcome(self.case)
        return replace(outcome, notes=(*outcome.notes, *self.finder.remarks()))


@contextmanager
def observe(
    instrument: str | Instrument = "timing",
    *,
    name: str = "loop",
    skip: int = 0,
    steps: int | None = None,
) -> Iterator[Observation]:
    """Measure the steps of your own training loop.

    Phases are found as ``dpbench exec`` finds them. The loop may go on after the last step.

    Args:
        instrument: ``timing``, ``logical``, ``cupti``, or another one with a recorder.
        name: the name of the loop in the report.
        skip: number of first steps that do not count.
        steps: number of steps that count; by default all, with ``cupti`` 5. ``cupti`` takes three
            times as many: timed, counted by phase, and counted as a whole.

    Examples:
        >>> with observe("timing", skip=3, steps=5) as seen:  # doctest: +SKIP
        ...     for batch in loader:
        ...         with seen.step():
        ...             train_step(batch)
        >>> seen.report.value("step_time_seconds", "clip")  # doctest: +SKIP
    """
    if skip < 0 or (steps is not None and steps < 1):
        raise ConfigurationError(f"observe needs skip >= 0 and steps >= 1, not {skip} and {steps}")
    chosen, case = instrument, Script(name)
    if isinstance(chosen, str):
        [chosen] = choose([chosen], Settings(), "step")
    recorder = chosen.recorder(case, steps)
    finder = StepFinder(recorder, skip=skip, by_hand=True)
    with closing(recorder), closing(finder):
        watch(finder)
        if not chosen.hardware:
            watch_threads_and_forks(finder)
        yield Observation(case, recorder, finder)


@dataclass(frozen=True, eq=False)
class FunctionInstrument(InstrumentWrapper):
    """Calls a function, one training step, again and again, and measures it by an instrument."""

    step: Callable[[], object]
    steps: Steps

    def start(self, case: Subject) -> PendingMeasurement:
        return PendingFunction(self, case)


@dataclass(eq=False)
class PendingFunction(PendingMeasurement):
    """A function's measurement; the steps are taken when the rows are asked for."""

    instrument: FunctionInstrument
    case: Subject

    def rows(self) -> list[Measurement]:
        import torch

        from dpbench.child.step import with_gpus_locked

        instrument, steps = self.instrument.instrument, self.instrument.steps
        device = torch.device("cuda" if on_cuda() else "cpu")
        taken = observe(instrument, name=self.case.id, skip=steps.warmup, steps=steps.active)
        with with_gpus_locked(device, self.case.id), taken as seen:
            while not seen.recorder.finished:
                with seen.step():
                    self._take()
        outcome = seen.outcome
        self.operators, self.notes = outcome.operators, outcome.notes
        self.imported = imported_files()
        if not any(row.value for row in outcome.rows):
            raise CaseFailed(
                f"{self.case.id}: the function did nothing that could be counted: it must take one "
                f"training step each time it is called"
            )
        return list(outcome.rows)

    def _take(self) -> None:
        try:
            self.instrument.step()
        except Exception as error:
            what = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
            raise CaseFailed(f"{self.case.id}: {what}") from error
