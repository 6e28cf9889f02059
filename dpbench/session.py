"""One session: a plan of subjects and instruments becomes a run, for pytest and the commands.

It measures each case once, however many processes ask for it, writes its files on the way, can
resume an interrupted run, and compares at its end.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpbench.child.imported import digest
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.registry import OUTPUTS
from dpbench.core.subject import Subject, subject_from
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Storage, check_comparable, latest_passed_run
from dpbench.session_store import Hook, Keys, RunWriter, SessionStore, reporting
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.gpu import Gpu
    from dpbench.core.grid import Grid
    from dpbench.core.settings import Settings
    from dpbench.instruments.interface import Instrument
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Unjudged, Verdict
    from dpbench.show.layout import Table


class Failure(NamedTuple):
    """Why a test fails: rows that got worse, and what its own limits did not judge."""

    regressions: list[dict[str, Any]]
    unjudged: Sequence[Unjudged] = ()


class Session:
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

    # --- what it is compared with ------------------------------------------------------------

    @property
    def asked(self) -> Keys:
        """What the session is known to ask for."""
        of_tests = (key for request in self.store.requests for key in request.asked)
        return [*dict.fromkeys([*self._planned, *of_tests])]

    def _check_reference(self) -> None:
        """Find a run to compare with before anything is measured, if limits need one."""
        settings, across = self.settings, self.settings.compare_across
        if settings.compare:
            option = "--dpbench-compare-across" if settings.of_pytest else ""
            name = "this session"
            check_comparable(self.reference, self.sources, name, across=across, option=option)
            return
        if not self.limits or settings.compare_first_run_ok:
            return
        if self.reference.frame.empty if self._planned else not self._candidates:
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            with_cases = " has any of these cases" if self._planned else ""
            raise ConfigurationError(
                f"no saved run on {devices} in {settings.storage}{with_cases} to judge by; if this "
                f"is the first, say {settings.option('compare_first_run_ok')}"
            )

    @cached_property
    def _candidates(self) -> list[Path]:
        """The files of which one may be the reference, the newest first."""
        devices = {device for device, _ in self.sources}
        paths = Storage(self.settings.storage).candidates(devices)
        return [path for path in paths if path != self.files.path]

    @cached_property
    def reference(self) -> Run:
        """The named run, or the latest valid reference; a run without rows if there is none."""
        settings, notes = self.settings, list[str]()
        if settings.compare:
            is_number = settings.compare.isdecimal()
            named = settings.compare if is_number else str(settings.directory / settings.compare)
            return Run.load(Storage(settings.storage).find(named))
        run = latest_passed_run(self._candidates, self.sources, self.asked, notes)
        if run is None and settings.compare_first_run_ok:
            for note in (note for note in notes if note.startswith("skipped")):
                option = settings.option("compare_first_run_ok")
                raise ConfigurationError(f"{option}: this is not the first; {note}")
        self.notes += notes
        return run or Run.of("the storage")

    def judge(self, *, complete: bool, passed: Collection[str] = ()) -> dict[str, Failure]:
        """Compare the session with its reference, and apply each limit to its cases.

        Args:
            complete: whether all that was asked for has ended.
            passed: the tests that have passed so far.

        Returns:
            Why tests fail, by their ids: what they asked for got worse by more than a limit, or
            their own limits judged nothing.
        """
        failures: dict[str, Failure] = {}
        with reporting(self.problem):
            limited, own = self._limited(passed)
            outcomes = self.store.outcomes()
            if not (own or (self.settings.compares and (outcomes or self.limits))):
                return {}
            from dpbench.results.gate import Gate, Verdict

            across, first_run_ok = self.settings.compare_across, self.settings.compare_first_run_ok
            asked = {*self.asked, *(key for outcome in outcomes for key in outcome.asked)}
            run = self.begun and self.run  # with its conditions, which notes compare
            gate = Gate(self.reference, run, asked, across, first_run_ok)
            verdict = gate.judge(self.limits, {key for keys in limited.values() for key in keys})
            if self.limits and not complete:
                verdict.unjudged.clear()
                self.problem(
                    f"the session ended early, so {self.settings.option('compare_fail')} has not "
                    f"judged all that was asked for"
                )
            for test, keys in limited.items():
                rows = [
                    r for r in verdict.regressions if (subject_from(r), r["instrument"]) in keys
                ]
                failures[test] = Failure(rows)
            verdicts = [verdict]
            for (test, limits), keys in own.items():
                verdicts.append(gate.judge(read_limits(limits), {*keys}))
                failures[test] = Failure(verdicts[-1].regressions, verdicts[-1].unjudged)
            self.verdict = Verdict.merge(verdicts)
            self._judged = len(outcomes)
            self._report(self.verdict)
        measured = {r.test for r in self.store.requests if r.params is not None} | {*passed}
        return {
            test: failures[test] for test in failures if test in measured and any(failures[test])
        }

    def _limited(self, passed: Collection[str]) -> tuple[dict[str, Keys], dict[Any, Keys]]:
        """The cases of the command line's limits, by test; and each test's own limits."""
        limited: dict[str, Keys] = {"": [*self._planned]}
        own: dict[tuple[str, tuple[str, ...]], Keys] = {}
        for request in self.store.requests:
            if request.limits is None:
                limited.setdefault(request.test, []).extend(request.asked)
            elif request.limits and (request.asked or request.test in passed):
                own.setdefault((request.test, request.limits), []).extend(request.asked)
        return limited, own

    def _report(self, verdict: Verdict) -> None:
        """Note what was compared; list as problems what was not judged, and what got worse."""
        from dpbench.show.comparison import exceeded_lines

        if not self.reference.frame.empty:
            self.notes.append(f"compared with {self.reference.name}")
        self.notes += verdict.notes
        for missing in verdict.unjudged:
            self.problem(f"{missing}{self.remedy}")
        for line in exceeded_lines(verdict.regressions):
            self.problem(line)

    @property
    def remedy(self) -> str:
        """A hint at the option that helps without a reference."""
        if not self.reference.frame.empty:
            return ""
        option = self.settings.option("compare_first_run_ok")
        return f" (if this is the first run, say {option})"

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


def read_limits(texts: Sequence[str]) -> list[Threshold]:
    """The limits that a user wrote."""
    if not texts:
        return []
    from dpbench.results.compare import Threshold  # loads pandas

    return [Threshold.parse(text) for text in texts]


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
