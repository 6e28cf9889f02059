"""Steps of one's own loop by an instrument, in the process that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dpbench.case import Case, script_case
from dpbench.errors import ConfigurationError
from dpbench.instruments.recorders import Recorder, recorder
from dpbench.process.script import StepFinder
from dpbench.process.watched import watch
from dpbench.results.outcome import Outcome
from dpbench.results.report import CaseReport


class Observed:
    """What `observe` hands out: says where steps are, and has the report."""

    def __init__(self, case: Case, heard: Recorder, finder: StepFinder) -> None:
        self._case, self._heard, self._finder = case, heard, finder
        self._notes: list[str] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step; its phases are found, or said by `dpbench.phase`."""
        finder = self._finder
        finder.begin_step()
        try:
            yield
        except BaseException as error:
            finder.give_up_step()
            self._notes.append(f"{type(error).__name__} ended step {finder.steps}: not counted")
            raise
        finder.end_step()
        if finder.failure:
            raise finder.failure

    @property
    def report(self) -> CaseReport:
        """The report of the steps so far, as a fixture's: ``value``, ``phases``, ``ratio_to``."""
        if not self._heard.heard:
            raise ConfigurationError(
                f"{self._case.id}: no step was observed: put `with seen.step():` around each, and "
                f"take more than are skipped"
            )
        outcome = Outcome(
            self._case,
            tuple(self._heard.rows(self._case)),
            0.0,
            operators=tuple(self._heard.operators),
            notes=(*self._heard.notes, *self._finder.notes, *self._notes),
        )
        return CaseReport.of_outcome(outcome)


@contextmanager
def observe(
    instrument: str = "timing", *, name: str = "loop", skip: int = 0, steps: int | None = None
) -> Iterator[Observed]:
    """Observe a training loop of one's own.

    >>> with observe("timing", skip=3, steps=5) as seen:  # doctest: +SKIP
    ...     for batch in loader:
    ...         with seen.step():
    ...             train_step(batch)
    >>> seen.report.value("step_time_seconds", "clip")  # doctest: +SKIP

    Forward, backward, clip, noise and optimizer are found as ``dpbench exec`` finds them. After
    the observed steps the loop goes on unobserved.

    Args:
        instrument: ``timing``, ``logical`` or ``cupti``.
        name: what the report calls the loop.
        skip: steps that come before those that count.
        steps: how many count, all by default. With ``cupti`` as many are timed, counted by phase
            and counted as a whole: the loop needs three times as many; 5 by default.
    """
    if skip < 0 or (steps is not None and steps < 1):
        raise ConfigurationError(f"observe needs skip >= 0 and steps >= 1, not {skip} and {steps}")
    heard = recorder(instrument, steps)
    finder = StepFinder(heard, skip=skip, by_hand=True)
    with ExitStack() as held:
        held.callback(heard.close)
        held.callback(finder.close)
        watch(finder)
        yield Observed(script_case(name), heard, finder)
