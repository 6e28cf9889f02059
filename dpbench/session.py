"""Defines a session, which measures cases, saves a run and compares it with a reference run.

A session measures each case once with the same instruments, even if several processes request the
case. It writes the run and JSON files after each case. A session can continue a run that was
interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpbench.child.imported import all_unchanged
from dpbench.core.files import printable
from dpbench.core.registry import OUTPUTS
from dpbench.core.subject import Subject
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.run import Run
from dpbench.session_comparison import Failure, SessionComparison
from dpbench.session_files import Hook, RunWriter, device_of, sources
from dpbench.session_store import SessionStore
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.gpu import Gpu
    from dpbench.core.grid import Grid
    from dpbench.core.settings import Settings
    from dpbench.instruments.interface import Instrument
    from dpbench.show.layout import Table


class Session:
    """A session of measurements. Each process of the session has one object.

    The first process begins and finishes the session. Workers of pytest-xdist join the session with
    the values that `shared` returns in the first process. All processes share the outcomes of cases
    and the requests of tests.

    Args:
        plan: pairs of a case and an instrument that measures the case; empty if tests request the
            cases.
        settings: the session's settings.
        gpu: the GPU on which the session measures; None if it uses no GPU.
        instruments: the instruments of the session; if empty, the instruments in the plan.
        grid: the session's grid; by default the grid that the settings choose.
        workers: the number of workers of pytest-xdist.
        shared: the values that `shared` returned in the first process; None in the first process.
        on_environment: called with the description of software and machine when this description is
            first needed.
        on_document: called with the run's document before each write of the run.
    """

    def __init__(
        self,
        plan: Sequence[tuple[Subject, Instrument]],
        settings: Settings,
        *,
        gpu: Gpu | None = None,
        instruments: Sequence[Instrument] = (),
        grid: Grid | None = None,
        workers: int = 0,
        shared: Mapping[str, Any] | None = None,
        on_environment: Hook = lambda environment: None,
        on_document: Hook = lambda document: None,
    ) -> None:
        self.settings = settings
        planned = {instrument.name: instrument for _, instrument in plan}
        self.instruments = [*(instruments or planned.values())]
        self.gpu = gpu
        self.workers = workers
        self.grid = grid or settings.chosen_grid()
        self.view = TableOptions.of(settings, self.grid.baseline)
        self.notes = self.grid.notes
        """Lines to print at the end of the session."""
        self.problems: list[str] = []
        """Lines to print as errors. A session with a problem fails."""
        self._run: Run | None = None
        self._planned = [(case, instrument.name) for case, instrument in plan]
        self._on_environment = on_environment
        shared = shared or {}
        self.store = SessionStore(shared.get("directory"))
        self.began: float = shared.get("began", time.monotonic())
        self.files = RunWriter(
            settings, self.view, self.notes, self.problem, on_document, shared.get("path")
        )
        self.comparison = SessionComparison(
            settings,
            self.store,
            self._planned,
            sources(self.instruments, settings, gpu),
            self.files,
        )
        if begun := shared.get("begun"):
            self.begun = Run.of("this session", (), *begun)

    def begin(self) -> None:
        """Check the outputs and instruments before anything is measured.

        If the settings request a comparison, also check the reference run. If the settings request
        a saved run, also open the file of the run.
        """
        for kind, _ in self.settings.files.values():
            OUTPUTS[kind]  # fails if a package is not installed
        from dpbench.runner import check_ranks

        for case in [case for case, _ in self._planned] or self.grid.cases():
            check_ranks(case, self.instruments)
        for instrument in self.instruments:
            instrument.check()
        if self.settings.compares:
            self.comparison.check_reference()
        if self.settings.saves:  # last, so that no file is made if a check fails
            device = device_of(self.instruments, self.settings, self.gpu)
            self.begun = self.files.open(device, self.begun, self._session_record(()))
            done = [outcome for outcome in self.begun.outcomes if outcome.error is None]
            kept = [outcome for outcome in done if all_unchanged(outcome.imported)]
            self.store.keep(kept)
            if again := [outcome.case.id for outcome in done if outcome not in kept]:
                self.notes.append(
                    f"measured again, because their code, files or variables have changed: "
                    f"{', '.join(again)}"
                )

    @cached_property
    def begun(self) -> Run:
        """The run at the beginning of this session, with outcomes only if it continues a run.

        This property is computed on first use, because computing it calls git.
        """
        from dpbench.results.conditions import environment, new_run

        tools = {name: version for i in self.instruments for name, version in i.versions.items()}
        on_hardware = any(instrument.hardware for instrument in self.instruments)
        described = environment(
            self.gpu.identity if self.gpu and on_hardware else None,
            tools=tools,
            project=self.settings.directory.absolute(),
        )
        self._on_environment(described)
        shard = self.settings.shard
        return new_run(described, self.grid.as_json(), self.instruments, self.workers, shard)

    @property
    def run(self) -> Run:
        """The run with all outcomes so far. If `begun` is known, its conditions are included."""
        outcomes = tuple(self.store.outcomes())
        if (known := self._run) is None or known.measured != outcomes:
            begun = self.begun if "begun" in vars(self) else None
            environment = begun.environment if begun else {}
            session = begun.session if begun else {"grid": self.grid.as_json()}
            self._run = known = Run.of("this session", outcomes, environment, session)
        return known

    def shared(self) -> dict[str, Any]:
        """Return the values with which another process joins the session, as plain JSON types."""
        writes_files = self.files.path or self.settings.files
        return {
            "directory": str(self.store.directory),
            "began": self.began,
            "path": str(self.files.path) if self.files.path else None,
            "begun": [self.begun.environment, self.begun.session] if writes_files else None,
        }

    def measure(self, case: Subject, instruments: Sequence[Instrument] | None = None) -> Outcome:
        """Return the outcome of a case with these instruments, by default all of the session.

        Measures the case if no process of the session has measured it with the same instruments.
        After a measurement, writes the run and JSON files.
        """
        from dpbench.runner import measure

        chosen = self.instruments if instruments is None else instruments
        fresh: list[Outcome] = []

        def measure_now(case: Subject) -> Outcome:
            fresh.append(measure(case, chosen))
            return fresh[0]

        outcome = self.store.once(case, measure_now, by=[i.name for i in chosen])
        if fresh:
            self.write()
        return outcome

    def write(self, *, complete: bool = False, last: bool = False) -> None:
        """Write the run and JSON files. If ``last`` is True, also write all other outputs."""
        if not (self.files.wanted(last=last) and self.store.outcomes()):
            return
        with self.store.lock():
            session = self._session_record(self.store.outcomes(), complete=complete)
            self.files.write(self.run, session, last=last)

    def _session_record(
        self, outcomes: Sequence[Outcome], *, complete: bool = False
    ) -> dict[str, Any]:
        """Return the ``session`` entry of the run's document.

        The status is ``interrupted`` until the session is complete.
        """
        record, verdict = self.begun.session, self.comparison.verdict
        unjudged = [vars(missing) for missing in verdict.unjudged] if verdict else []
        return record | {
            "cases_asked": max(record["cases_asked"], self._count_cases(outcomes)),
            "seconds": round(record["seconds"] + time.monotonic() - self.began, 1),
            "status": COMPLETE if complete else INTERRUPTED,
            "regressed": bool(verdict and verdict.regressions),
            "regressions": verdict.regressions if verdict else [],
            "unjudged": unjudged,
        }

    def _count_cases(self, outcomes: Sequence[Outcome]) -> int:
        """Count the cases in the plan, and in requests from before a test runs or from hooks.

        Without a plan, also counts the measured cases of the grid. Each case counts once.
        """
        of_grid = () if self._planned else self.grid.cases()
        measured = {outcome.case for outcome in outcomes}.intersection(of_grid)
        known = {request.case for request in self.store.requests if request.params is None}
        return len(measured.union(case for case, _ in self._planned) | known - {None})

    def problem(self, text: str) -> None:
        """Add a line to `problems`, without duplicates."""
        if printable(text) not in self.problems:
            self.problems.append(printable(text))

    def check_limits(self, *, complete: bool, passed: Collection[str] = ()) -> dict[str, Failure]:
        """Compare the session with its reference run, and check the limits.

        Args:
            complete: True if everything requested has been measured.
            passed: the ids of the tests that have passed.

        Returns:
            The reasons for failure, by the ids of tests whose limits failed or were not checked.
        """

        def run() -> Run:
            return self.begun and self.run  # without `begun`, the run lacks its conditions

        return self.comparison.check_limits(run, complete=complete, passed=passed)

    def finish(self, *, complete: bool) -> None:
        """Check the limits if they are unchecked, write all files, and close the run's file.

        Args:
            complete: True if everything requested has been measured.
        """
        if self.comparison.verdict is None:
            self.check_limits(complete=complete)
        outcomes = self.store.outcomes()
        if self.comparison.verdict is not None and (late := outcomes[self.comparison.judged :]):
            names = ", ".join(outcome.case.id for outcome in late)
            self.problem(f"measured after the last test, so limits were not checked: {names}")
        if self.files.path is not None:  # a resumed run may have requested more cases
            complete = complete and self._count_cases(outcomes) >= self.begun.cases_asked
        self.write(complete=complete, last=True)
        self.files.close()

    def summary(self) -> list[Table]:
        """Return the tables of the session, and tables of changes after a comparison."""
        from dpbench.show.comparison import comparison_tables
        from dpbench.show.outputs import summary_tables

        tables = summary_tables(self.run, self.view)
        if (verdict := self.comparison.verdict) is not None:
            tables += comparison_tables(verdict, "Change: ", self.comparison.reference.name)
        return tables

    @property
    def failed(self) -> bool:
        """True if a case failed or there is a problem, such as an exceeded limit."""
        return bool(self.problems) or any(outcome.error for outcome in self.store.outcomes())

    def close(self) -> None:
        """Remove the directory through which the processes of the session shared outcomes."""
        self.store.close()
