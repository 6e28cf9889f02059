"""Measures the steps of a user's loop or function in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from dpbench.child.imported import imported_files
from dpbench.child.messages import Steps
from dpbench.child.patches import watch, watch_threads_and_forks
from dpbench.child.recorder import Recorder, on_cuda
from dpbench.child.step_finder import StepFinder
from dpbench.core.errors import CaseFailed, ConfigurationError, own_line
from dpbench.core.settings import Settings
from dpbench.core.subject import Script, Subject
from dpbench.instruments import choose
from dpbench.instruments.interface import Instrument, InstrumentWrapper
from dpbench.launch.case_process import PendingMeasurement
from dpbench.results.outcome import Outcome
from dpbench.results.report import CaseReport


class Observation:
    """The object that `observe` yields to mark steps and to create the report."""

    def __init__(self, case: Subject, recorder: Recorder, finder: StepFinder) -> None:
        self.case, self.recorder, self.finder = case, recorder, finder

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one training step.

        dpbench finds the phases of the step. `dpbench.phase` marks phases explicitly.
        """
        finder = self.finder
        finder.start_step()
        try:
            yield
        except BaseException as error:
            finder.give_up_step()
            finder.notes.append(
                f"step {finder.steps} is not counted, because it raised {type(error).__name__}"
            )
            raise
        finder.end_step()
        if finder.failure:
            raise finder.failure

    @property
    def report(self) -> CaseReport:
        """Report of the counted steps. The pytest fixtures return the same class."""
        if not self.recorder.observed:
            raise ConfigurationError(
                f"{self.case.id}: no step was counted: put `with seen.step():` around each step, "
                f"and run more steps than `skip`"
            )
        return CaseReport.of_outcome(self.outcome)

    @property
    def outcome(self) -> Outcome:
        """Rows, notes and counts of operators of the counted steps."""
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

    dpbench finds the phases in the same way as ``dpbench exec``. The loop may continue after the
    last counted step.

    Args:
        instrument: ``timing``, ``logical``, ``cupti``, or another instrument that can measure a
            step.
        name: the name of the loop in the report.
        skip: number of steps to ignore at the beginning.
        steps: number of steps to count. If None, ``cupti`` counts 5 steps, and other instruments
            count all steps. With ``cupti``, the loop must run at least three times as many steps,
            because ``cupti`` first times steps, then counts steps by phase, and then counts whole
            steps.

    Examples:
        >>> with observe("timing", skip=3, steps=5) as seen:  # doctest: +SKIP
        ...     for batch in loader:
        ...         with seen.step():
        ...             train_step(batch)
        >>> seen.report.value("step_time_seconds", "clip")  # doctest: +SKIP
    """
    if skip < 0 or (steps is not None and steps < 1):
        raise ConfigurationError(
            f"observe requires skip >= 0 and steps >= 1, but skip is {skip} and steps is {steps}"
        )
    chosen, case = instrument, Script(name)
    if isinstance(chosen, str):
        [chosen] = choose([chosen], Settings(), "step")
    elif not chosen.measures("step"):
        raise ConfigurationError(
            f"the instrument {chosen.name} cannot measure a step: choose timing, cupti or logical"
        )
    recorder = chosen.recorder(case, steps)
    finder = StepFinder(recorder, skip=skip, by_hand=True)
    with closing(recorder), closing(finder):
        watch(finder)
        if not chosen.hardware:
            watch_threads_and_forks(finder)
        yield Observation(case, recorder, finder)


@dataclass(frozen=True, eq=False)
class FunctionInstrument(InstrumentWrapper):
    """An instrument that calls a function repeatedly. Each call is one training step."""

    step: Callable[[], object]
    steps: Steps

    def start(self, case: Subject) -> PendingMeasurement:
        return PendingFunction(self, case)


@dataclass(eq=False)
class PendingFunction(PendingMeasurement):
    """A measurement of a function. `outcome` calls the function."""

    instrument: FunctionInstrument
    case: Subject

    def outcome(self) -> Outcome:
        import torch

        from dpbench.child.case import with_gpus_locked

        instrument, steps = self.instrument.instrument, self.instrument.steps
        device = torch.device("cuda" if on_cuda() else "cpu")
        taken = observe(instrument, name=self.case.id, skip=steps.warmup, steps=steps.active)
        with with_gpus_locked(device, self.case.id), taken as seen:
            while not seen.recorder.finished:
                with seen.step():
                    self._take()
        outcome = replace(seen.outcome, imported=imported_files())
        if not any(row.value for row in outcome.rows):
            nothing = f"{self.case.id}: the function did no work that could be counted: each call "
            return outcome.with_error(CaseFailed(f"{nothing}must run one training step"))
        return outcome

    def _take(self) -> None:
        try:
            self.instrument.step()
        except Exception as error:
            what = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
            raise CaseFailed(f"{self.case.id}: {what}") from error
