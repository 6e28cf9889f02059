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
from dpbench.core.case import Case
from dpbench.core.files import printable
from dpbench.core.registry import OUTPUTS
from dpbench.findings import Asked, Findings
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Reference
from dpbench.saving import Files, Hook, reporting
from dpbench.show.view import View

if TYPE_CHECKING:
    from dpbench.core.gpu import Gpu
    from dpbench.core.grid import Grid
    from dpbench.core.settings import Settings
    from dpbench.instruments.interface import Instrument
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Verdict
    from dpbench.show.layout import Table


class Session:
    """A session, in each process that takes part in it.

    The first process begins and finishes it. Others (xdist workers) join it with what the first
    has `shared`. What one of them has measured, or reports of a test, is known to all of them.

    Args:
        plan: what is measured, each case by an instrument, as far as it is known.
        settings: what was asked for.
        gpu: the GPU that measures, if one does.
        instruments: what measures cases that are not planned; by default all those of the plan.
        grid: the cases that the session is about; by default those that the settings choose.
        workers: the number of other processes.
        shared: what the first process has `shared`; None in the first process itself.
        on_environment: called once with the run's description of software and machine.
        on_document: called with the run's document each time before it is written.
    """

    def __init__(
        self,
        plan: Sequence[tuple[Case, Instrument]],
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
        self.view = View.of(settings, self.grid.baseline)
        self.sources = sources(self.instruments, settings, gpu)
        self.limits = read_limits(settings.compare_fail)
        """Those of the command line; tests may have their own."""
        self.notes = self.grid.notes
        """Lines that are printed at the end of the session."""
        self.problems: list[str] = []
        """Lines that are printed as errors; a session with one has failed."""
        self.tables: list[Table] = []
        """What changed since the reference."""
        self._planned = [(case, instrument.name) for case, instrument in plan]
        self._on_environment = on_environment
        shared = shared or {}
        self.findings = Findings(shared.get("directory"))
        self.began: float = shared.get("began", time.monotonic())
        self.files = Files(
            settings, self.view, self.notes, self.problem, on_document, shared.get("path")
        )
        self._reference = Reference(settings, self.sources, self.notes, shared.get("reference"))
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
            first_run_ok = self.settings.compare_first_run_ok
            self._reference.find(self._planned, must_exist=bool(self.limits) and not first_run_ok)
        if self.settings.saves:  # last: no number is taken if anything else fails
            device = device_of(self.instruments, self.settings, self.gpu)
            self.begun = self.files.open(device, self.begun, self._stands(()))
            done = [outcome for outcome in self.begun.outcomes if outcome.error is None]
            kept = [o for o in done if all(digest(Path(f)) == d for f, d in o.imported.items())]
            self.findings.keep(kept)
            if again := [outcome.case.id for outcome in done if outcome not in kept]:
                self.notes.append(f"measured again, for their code has changed: {', '.join(again)}")

    @property
    def asked(self) -> Asked:
        """What the session is known to ask for."""
        return [*self._planned, *(key for asked in self.findings.tests.values() for key in asked)]

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

    # --- for other processes of the session --------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """What another process needs to join the session, as plain JSON types."""
        writes = self.files.path or self.settings.files
        return {
            "directory": str(self.findings.directory),
            "began": self.began,
            "path": str(self.files.path) if self.files.path else None,
            "begun": [self.begun.environment, self.begun.session] if writes else None,
            "reference": self._reference.files,
        }

    # --- measuring ---------------------------------------------------------------------------

    def measure(self, case: Case, instruments: Sequence[Instrument] | None = None) -> Outcome:
        """The outcome of a case by these instruments or the session's, written at once."""
        from dpbench.runner import measure

        chosen = self.instruments if instruments is None else instruments
        fresh: list[Outcome] = []

        def measure_now(case: Case) -> Outcome:
            fresh.append(measure(case, chosen))
            return fresh[0]

        outcome = self.findings.once(case, measure_now, by=[i.name for i in chosen])
        if fresh:
            self.write()
        return outcome

    # --- judging -----------------------------------------------------------------------------

    @property
    def reference(self) -> Run:
        """The run that the session is compared with; without rows if there is none."""
        by_name = [test for test, asked in self.findings.tests.items() if not asked]
        return self._reference.run(self.asked, by_name)

    def judge(self, after: Run, limits: Sequence[Threshold], asked: Asked) -> Verdict:
        """The verdict of these limits on a run, compared with the reference."""
        from dpbench.results.gate import Gate

        across, first_run_ok = self.settings.compare_across, self.settings.compare_first_run_ok
        return Gate(self.reference, after, {*asked}, across, first_run_ok).judge(limits)

    @property
    def remedy(self) -> str:
        """Words about the option that helps if there is no reference."""
        if not self.reference.frame.empty:
            return ""
        option = self.settings.option("compare_first_run_ok")
        return f" (if this is the first run, say {option})"

    def _compare(self, outcomes: Sequence[Outcome], limited: Asked, complete: bool) -> None:
        """Make the tables of changes, and judge by the limits what they apply to."""
        # Tests may have limits of their own.
        compares = self.settings.compares or self.findings.reference or self.findings.unjudged
        if not (compares and (outcomes or self.limits)):
            return
        from dpbench.show.comparison import comparison_tables

        run = Run.of("this session", outcomes, self.begun.environment, self.begun.session)
        asked = [*self.asked, *limited, *(key for outcome in outcomes for key in outcome.asked)]
        every = self.judge(run, self.limits, asked)
        if not self.reference.frame.empty:
            self.notes.append(f"compared with {self.reference.name}")
        self.notes += every.notes
        self.tables = comparison_tables(every, "Change: ", self.reference.name)
        verdict = self.judge(run, self.limits, limited)
        unjudged = verdict.unjudged
        if self.limits and not complete:
            unjudged = []
            self.problem(
                f"the session ended early, so {self.settings.option('compare_fail')} has not "
                f"judged all that was asked for"
            )
        self.findings.share(regressions=verdict.regressions, unjudged=unjudged)

    def _fail_without_measuring(self) -> None:
        """Fail because no test was run that the command line's limits are for."""
        from dpbench.results.gate import Unjudged

        option, self.limits = self.settings.option("compare_fail"), []
        missing = Unjudged(option, [], "no test that was selected measures anything for it")
        self.findings.share(unjudged=[missing])
        self.problem(str(missing))

    def _list_failures(self) -> None:
        """List as problems what could not be judged, and then what exceeded its limit."""
        unjudged, regressions = self.findings.unjudged, self.findings.regressions
        if not (unjudged or regressions):
            return
        from dpbench.results.gate import Unjudged
        from dpbench.show.comparison import exceeded_lines

        for row in unjudged:
            self.problem(f"{Unjudged(**row)}{self.remedy if row['cases'] else ''}")
        for line in exceeded_lines(regressions):
            self.problem(line)

    # --- files -------------------------------------------------------------------------------

    def write(self, *, complete: bool = False, last: bool = False) -> None:
        """Write the run and the files; pages and pipes only the last time."""
        if not (self.files.wanted(last=last) and self.findings.outcomes()):
            return
        with self.findings.lock():
            outcomes = self.findings.outcomes()
            session = self._stands(outcomes, complete=complete)
            self.files.write(outcomes, self.begun.environment, session, last=last)

    def _stands(self, outcomes: Sequence[Outcome], *, complete: bool = False) -> dict[str, Any]:
        """The run's description of the session so far: ``interrupted`` until it is complete."""
        began, findings = self.begun.session, self.findings
        return began | {
            "cases_asked": max(began["cases_asked"], self._cases_of(outcomes)),
            "seconds": round(began["seconds"] + time.monotonic() - self.began, 1),
            "status": COMPLETE if complete else INTERRUPTED,
            "regressed": bool(findings.regressions),
            "regressions": findings.regressions,
            "unjudged": findings.unjudged,
        }

    def _cases_of(self, outcomes: Sequence[Outcome]) -> int:
        """The number of cases that are asked for, or are in the grid and measured."""
        measured = {outcome.case for outcome in outcomes}.intersection(self.grid.cases())
        return len(measured.union(case for case, _ in self.asked))

    def problem(self, text: str) -> None:
        """Add a problem, once."""
        if printable(text) not in self.problems:
            self.problems.append(printable(text))

    # --- the end -----------------------------------------------------------------------------

    def finish(self, *, complete: bool, limited: Asked | None = None) -> None:
        """Compare, write everything for the last time, release the run's file.

        Args:
            complete: whether every case that was asked for has an outcome, or a reason why not.
            limited: what the limits of the command line apply to; None if they apply to nothing.
        """
        outcomes, is_for_none = self.findings.outcomes(), limited is None and complete
        with reporting(self.problem):
            if self.limits and is_for_none:
                self._fail_without_measuring()
            self._compare(outcomes, limited or (), complete)
            self._list_failures()
        if self.files.path is not None:  # a run that it resumes may have been asked for more
            complete = complete and self._cases_of(outcomes) >= self.begun.cases_asked
        self.write(complete=complete, last=True)
        self.files.let_go()

    def summary(self) -> list[Table]:
        """Every table of the session, the comparison's last."""
        from dpbench.show.export import summary_tables

        return [*summary_tables(self.findings.outcomes(), self.view), *self.tables]

    @property
    def failed(self) -> bool:
        """Whether a case failed, something got worse, or there is a problem."""
        broken = any(o.error for o in self.findings.outcomes())
        return bool(broken or self.problems)

    def close(self) -> None:
        """Remove what its processes shared."""
        self.findings.close()


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


def read_limits(texts: Sequence[str]) -> list[Threshold]:
    """The limits that a user wrote."""
    if not texts:
        return []
    from dpbench.results.compare import Threshold  # loads pandas

    return [Threshold.parse(text) for text in texts]
