"""One session: a plan of subjects and instruments becomes a run, for pytest and the commands.

It measures each case once, however many processes ask for it, writes its files on the way, can
resume an interrupted run, and compares at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.child.imported import digest
from dpbench.core.case import Subject
from dpbench.core.files import printable
from dpbench.core.registry import OUTPUTS
from dpbench.judging import SessionJudging, read_limits
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.run_writer import Hook, RunWriter
from dpbench.session_store import SessionStore
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.gpu import Gpu
    from dpbench.core.grid import Grid
    from dpbench.core.settings import Settings
    from dpbench.instruments.interface import Instrument
    from dpbench.results.gate import Verdict
    from dpbench.show.layout import Table


class Session(SessionJudging):
    """A session, in each process that takes part in it.

    The first process begins and finishes it. Others (xdist workers) join it with what the first
    has `shared`. Measurements and reports of tests are shared by all of them.

    Args:
        plan: what is measured, each case by an instrument, as far as it is known.
        settings: what was asked for.
        gpu: the GPU that measures, if one does.
        instruments: those for cases outside the plan; by default all of the plan.
        grid: the session's grid; by default the one that the settings choose.
        workers: the number of other processes.
        shared: what the first process has `shared`; None in the first process itself.
        on_environment: called once with the run's description of software and machine.
        on_document: called with the run's document each time before it is written.
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
        self.sources = sources(self.instruments, settings, gpu)
        self.limits = read_limits(settings.compare_fail)
        """The limits of the command line; tests may have their own."""
        self.notes = self.grid.notes
        """Lines that are printed at the end of the session."""
        self.problems: list[str] = []
        """Lines that are printed as errors; a session with one has failed."""
        self.verdict: Verdict | None = None
        """How the session differs from its reference, once it is judged."""
        self._run: Run | None = None
        self._judged = 0
        """The number of outcomes when it was judged."""
        self._planned = [(case, instrument.name) for case, instrument in plan]
        self._on_environment = on_environment
        shared = shared or {}
        self.store = SessionStore(shared.get("directory"))
        self.began: float = shared.get("began", time.monotonic())
        self.files = RunWriter(
            settings, self.view, self.notes, self.problem, on_document, shared.get("path")
        )
        if begun := shared.get("begun"):
            self.begun = Run.of("this session", (), *begun)

    # --- before anything is measured ---------------------------------------------------------

    def begin(self) -> None:
        """Check the instruments, find references, take a number in the storage."""
        for kind, _ in self.settings.files.values():
            OUTPUTS[kind]  # what it needs may not be installed
        from dpbench.runner import check_ranks

        for case in [case for case, _ in self._planned] or self.grid.cases():
            check_ranks(case, self.instruments)
        for instrument in self.instruments:
            instrument.check()
        if self.settings.compares:
            self._check_reference()
        if self.settings.saves:  # last: no number is taken if anything else fails
            device = device_of(self.instruments, self.settings, self.gpu)
            self.begun = self.files.open(device, self.begun, self._session_record(()))
            done = [outcome for outcome in self.begun.outcomes if outcome.error is None]
            kept = [o for o in done if all(digest(Path(f)) == d for f, d in o.imported.items())]
            self.store.keep(kept)
            if again := [outcome.case.id for outcome in done if outcome not in kept]:
                self.notes.append(f"measured again, for their code has changed: {', '.join(again)}")

    @cached_property
    def begun(self) -> Run:
        """The run before its first case; computed only if needed, because it calls git."""
        from dpbench.results.conditions import begun, environment

        tools = {name: version for i in self.instruments for name, version in i.versions.items()}
        on_hardware = any(instrument.hardware for instrument in self.instruments)
        described = environment(
            self.gpu if on_hardware else None,
            tools=tools,
            project=self.settings.directory.absolute(),
        )
        self._on_environment(described)
        shard = self.settings.shard
        return begun(described, self.grid, self.instruments, self.workers, shard)

    @property
    def run(self) -> Run:
        """The session so far, with the conditions of `begun` where something has needed them."""
        outcomes = tuple(self.store.outcomes())
        if (known := self._run) is None or known.measured != outcomes:
            begun = self.begun if "begun" in vars(self) else None
            environment = begun.environment if begun else {}
            session = begun.session if begun else {"grid": {"baseline": self.grid.baseline}}
            self._run = known = Run.of("this session", outcomes, environment, session)
        return known

    # --- for other processes of the session --------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """What another process needs to join the session, as plain JSON types."""
        writes = self.files.path or self.settings.files
        return {
            "directory": str(self.store.directory),
            "began": self.began,
            "path": str(self.files.path) if self.files.path else None,
            "begun": [self.begun.environment, self.begun.session] if writes else None,
        }

    # --- measuring ---------------------------------------------------------------------------

    def measure(self, case: Subject, instruments: Sequence[Instrument] | None = None) -> Outcome:
        """The outcome of a case by these instruments or the session's, written at once."""
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

    # --- files -------------------------------------------------------------------------------

    def write(self, *, complete: bool = False, last: bool = False) -> None:
        """Write the run and the files; pages and pipes only the last time."""
        if not (self.files.wanted(last=last) and self.store.outcomes()):
            return
        with self.store.lock():
            session = self._session_record(self.store.outcomes(), complete=complete)
            self.files.write(self.run, session, last=last)

    def _session_record(
        self, outcomes: Sequence[Outcome], *, complete: bool = False
    ) -> dict[str, Any]:
        """The run's description of the session so far: ``interrupted`` until it is complete."""
        began, verdict = self.begun.session, self.verdict
        unjudged = [vars(missing) for missing in verdict.unjudged] if verdict else []
        return began | {
            "cases_asked": max(began["cases_asked"], self._cases_of(outcomes)),
            "seconds": round(began["seconds"] + time.monotonic() - self.began, 1),
            "status": COMPLETE if complete else INTERRUPTED,
            "regressed": bool(verdict and verdict.regressions),
            "regressions": verdict.regressions if verdict else [],
            "unjudged": unjudged,
        }

    def _cases_of(self, outcomes: Sequence[Outcome]) -> int:
        """The number of cases that are asked for, or are in the grid and measured."""
        of_grid = () if self._planned else self.grid.cases()
        measured = {outcome.case for outcome in outcomes}.intersection(of_grid)
        known = {request.case for request in self.store.requests if request.params is None}
        return len(measured.union(case for case, _ in self._planned) | known - {None})

    def problem(self, text: str) -> None:
        """Add a problem, once."""
        if printable(text) not in self.problems:
            self.problems.append(printable(text))

    # --- the end -----------------------------------------------------------------------------

    def finish(self, *, complete: bool) -> None:
        """Judge what is not judged yet, write all files a last time, release the run's file.

        Args:
            complete: whether every case that was asked for has an outcome, or a reason why not.
        """
        if self.verdict is None:
            self.judge(complete=complete)
        outcomes = self.store.outcomes()
        if self.verdict is not None and (late := outcomes[self._judged :]):
            names = ", ".join(outcome.case.id for outcome in late)
            self.problem(f"measured after the last test, and so judged by no limit: {names}")
        if self.files.path is not None:  # a run that it resumes may have been asked for more
            complete = complete and self._cases_of(outcomes) >= self.begun.cases_asked
        self.write(complete=complete, last=True)
        self.files.close()

    def summary(self) -> list[Table]:
        """Every table of the session, the comparison's last."""
        from dpbench.show.comparison import comparison_tables
        from dpbench.show.export import summary_tables

        listed = summary_tables(self.run, self.view)
        if self.verdict is not None:
            listed += comparison_tables(self.verdict, "Change: ", self.reference.name)
        return listed

    @property
    def failed(self) -> bool:
        """Whether a case failed, something got worse, or there is a problem."""
        broken = any(o.error for o in self.store.outcomes())
        return bool(broken or self.problems)

    def close(self) -> None:
        """Remove what its processes shared."""
        self.store.close()


def device_of(instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None) -> str | None:
    """The device that these instruments measure on; None without hardware."""
    if not any(instrument.hardware for instrument in instruments):
        return None
    return gpu.name if gpu and settings.device == "cuda" else "cpu"


def sources(
    instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None
) -> list[tuple[str, str]]:
    """Each (device, instrument) that a session can have rows of; tests may always count."""
    pairs = [(device_of([i], settings, gpu) or NO_HARDWARE, i.name) for i in instruments]
    return list(dict.fromkeys([*pairs, *([(NO_HARDWARE, "logical")] * settings.of_pytest)]))
