"""Defines a session, which measures cases, saves a run and compares it with a reference run.

A session measures each case once with the same instruments, even if several processes request the
case. It writes the run and JSON files after each case. A session can continue a run that was
interrupted.

A limit is checked where its number was measured: for a test at the end of the test's call, in the
process that ran the test, and for a plan when all is measured. At its end, a session checks what
was asked for and never judged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.child.imported import all_unchanged
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import check_writable, in_words, printable, write_text
from dpbench.core.gpu import Gpu
from dpbench.core.grid import Grid
from dpbench.core.registry import OUTPUTS
from dpbench.core.settings import Settings
from dpbench.core.subject import Asked, Subject, subject_from
from dpbench.instruments.interface import Instrument
from dpbench.results.conditions import automatic_name, environment, merge_interrupted, new_run
from dpbench.results.limits import RENEW, Judgement, Limit, Unjudged
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.outcome import document as as_document
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Storage, check_comparable, readable
from dpbench.runner import check_ranks, measure
from dpbench.session_store import Limits, SessionStore
from dpbench.show.layout import Table
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.results.gate import Comparison, Gate

Hook = Callable[[dict[str, Any]], object]
"""A function that may change a dictionary before the session writes the dictionary."""


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
        self.limits = [*map(Limit.parse, settings.compare_fail)]
        """The limits on the command line. The marker of a test can replace them for the test."""
        self.comparison: Comparison | None = None
        """The result of `check_limits`; None before, and if there is nothing to compare."""
        self._checked: int | None = None
        self._on_environment = on_environment
        shared = shared or {}
        self.store = SessionStore(shared.get("directory"))
        self.began: float = shared.get("began", time.monotonic())
        self.files = RunWriter(
            settings, self.view, self.notes, self.problem, on_document, shared.get("path")
        )
        here = sources(self.instruments, settings, gpu)  # a worker may see other GPUs
        self.references = References(
            settings, [(d, by) for d, by in shared.get("sources", here)], self.files
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
        planned = [case for case, _ in self._planned]
        for case in (planned or self.cases) if self.instruments else ():
            check_ranks(case, self.instruments)
        for instrument in self.instruments:
            instrument.check()
        if self.settings.compares:
            self.references.check(self._planned, limits=bool(self.limits))
        if self.settings.saves:  # last, so that no file is made if a check fails
            device = device_of(self.instruments, self.settings, self.gpu)
            self.begun = self.files.open(device, self.begun, self._session_record(()))
            done = [outcome for outcome in self.begun.outcomes if outcome.error is None]
            same = [outcome for outcome in done if all_unchanged(outcome.imported)]
            self.store.add(same)
            if again := [outcome.case.id for outcome in done if outcome not in same]:
                self.notes.append(
                    f"measured again, because their code, files or variables have changed: "
                    f"{', '.join(again)}"
                )

    @cached_property
    def cases(self) -> list[Case]:
        """The cases of the grid."""
        return self.grid.cases()

    @cached_property
    def begun(self) -> Run:
        """The run at the beginning of this session, with outcomes only if it continues a run.

        This property is computed on first use, because computing it calls git.
        """
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
            "sources": self.references.sources,
            "path": str(self.files.path) if self.files.path else None,
            "begun": [self.begun.environment, self.begun.session] if writes_files else None,
        }

    def measure(self, case: Subject, instruments: Sequence[Instrument] | None = None) -> Outcome:
        """Return the outcome of a case with these instruments, by default all of the session.

        Measures the case if no process of the session has measured it with the same instruments.
        After a measurement, writes the run and JSON files.
        """
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
        record, found = self.begun.session, self.comparison
        return record | {
            "cases_asked": max(record["cases_asked"], self._count_cases(outcomes)),
            "seconds": round(record["seconds"] + time.monotonic() - self.began, 1),
            "status": COMPLETE if complete else INTERRUPTED,
            "regressed": bool(found and found.regressions),
            "regressions": found.regressions if found else [],
            "unjudged": [vars(missing) for missing in found.unjudged] if found else [],
        }

    def _count_cases(self, outcomes: Sequence[Outcome]) -> int:
        """Count the cases in the plan, and in requests from before a test runs or from hooks.

        Without a plan, also counts the measured cases of the grid. Each case counts once.
        """
        of_grid = () if self._planned else self.cases
        measured = {outcome.case for outcome in outcomes}.intersection(of_grid)
        known = {request.case for request in self.store.requests if request.params is None}
        return len(measured.union(case for case, _ in self._planned) | known - {None})

    def problem(self, text: str) -> None:
        """Add a line to `problems`, without duplicates."""
        if printable(text) not in self.problems:
            self.problems.append(printable(text))

    def judge(self, test: str, texts: Limits) -> Judgement | None:
        """Check the limits of a test on what the test has measured, also in forks.

        Args:
            test: the test's id.
            texts: the limits of the test's marker, or None if those on the command line apply.

        Returns:
            What the limits say, which all processes will know, or None if nothing has a limit or
            the session compares nothing.
        """
        if not self.settings.compares:
            return None
        limits = self.limits if texts is None else [*map(Limit.parse, texts)]
        requests = [r for r in self.store.requests if r.test == test and r.params is not None]
        asked = {key for request in requests for key in request.asked}
        lost = self.references.steps_of(test) - {case for case, _ in asked} if limits else ()
        if not limits or (texts is None and not (asked or lost)):
            return None
        by = {request.instruments: None for request in requests}
        cases = {case: None for case, _ in asked}
        if any(limit.of for limit in limits):
            cases |= {case.with_trainer(self.grid.baseline): None for case in [*cases]}
        found = [self.store.outcome(case, names) for names in by for case in cases]
        outcomes = [outcome for outcome in found if outcome]
        run = Run.of("this session", outcomes, {}, self.begun.session)
        judgement = self.references.judge(run, asked, limits, idle=texts is None or bool(lost))
        if names := sorted(case.id for case in lost):
            why = f"the test does not measure it now; {RENEW}"
            judgement.unjudged.extend(Unjudged(str(limit), names, why) for limit in limits)
        self.store.tell_judged(texts, asked, judgement)
        return judgement

    def check_limits(self, *, complete: bool) -> None:
        """Check the limits on what was asked for and never judged, and compare the whole session.

        Args:
            complete: True if everything requested has been measured.
        """
        with reporting(self.problem):
            outcomes, judgements = self.store.outcomes(), self.store.judgements
            self._checked = len(outcomes)
            left = self._never_judged()
            if not self.settings.compares:
                self.notes += self._not_compared()
            elif outcomes or self.limits or judgements or left:
                self._compare(outcomes, [*judgements], left, complete=complete)

    def _not_compared(self) -> Iterator[str]:
        """Yield a note on markers, whose limits are checked only if the session compares."""
        marked = {request.test for request in self.store.requests if request.limits}
        if (count := len(marked)) and not self.settings.disable:
            tests = f"{count} test{'s' * (count > 1)}"
            option = self.settings.option("compare")
            yield f"limits of {tests} were not checked, because nothing was compared: add {option}"

    def _never_judged(self) -> dict[tuple[str, Limits], list[tuple[Subject, str]]]:
        """Return what was asked for and never judged, by the test and the limits of its marker.

        The test is "" for the plan and for requests of hooks.
        """
        asked: dict[tuple[str, Limits], list[tuple[Subject, str]]] = {("", None): [*self._planned]}
        for request in self.store.requests:
            limited = self.limits if request.limits is None else request.limits
            if limited and request.asked:
                asked.setdefault((request.test, request.limits), []).extend(request.asked)
        left = {by: self.store.never_judged(by[1], keys) for by, keys in asked.items()}
        return {by: keys for by, keys in left.items() if keys and (self.limits or by[1])}

    @property
    def _asked(self) -> Asked:
        """What the plan, tests and hooks have asked for."""
        of_tests = [key for request in self.store.requests for key in request.asked]
        return [*self._planned, *of_tests]

    @cached_property
    def reference(self) -> Run:
        """The run with which the whole session is compared."""
        return self.references.of(self._asked)

    def _compare(
        self,
        outcomes: Sequence[Outcome],
        judgements: list[Judgement],
        left: Mapping[tuple[str, Limits], Asked],
        *,
        complete: bool,
    ) -> None:
        from dpbench.results.gate import Comparison, Gate

        run = self.begun and self.run  # without `begun`, the run lacks its conditions
        asked = {*self._asked, *(key for outcome in outcomes for key in outcome.asked)}
        gate = Gate(
            self.reference,
            run,
            asked,
            self.settings.compare_across,
            self.settings.compare_first_run_ok,
        )
        for (_, texts), keys in left.items():
            limits = self.limits if texts is None else [*map(Limit.parse, texts)]
            found = self.references.judge(run, keys, limits, idle=texts is None)
            early = texts is None and not complete
            judgements.append(replace(found, unjudged=[]) if early else found)
        merged = Judgement.merge(judgements)
        if self.limits and not complete:
            self.problem(
                f"the session ended early, so {self.settings.option('compare_fail')} was not "
                f"checked for every requested case"
            )
        else:
            general = [key for r in self.store.requests if r.limits is None for key in r.asked]
            accepted = replace(gate, asked={*self._planned, *general}).numbers
            idle = [limit for limit in self.limits if not (gate.first_run_ok and accepted(limit))]
            merged.unjudged.extend([*replace(gate, asked={*self._asked}).idle(idle, merged)])
        changed = gate.compare()
        notes = [*self.references.notes(self.reference, self._asked, merged), *changed.notes]
        self.comparison = Comparison(
            merged.judged,
            merged.regressions,
            merged.unjudged,
            changed.changes,
            notes,
            gate,
        )
        self._report(self.comparison)

    def _report(self, comparison: Comparison) -> None:
        """Add the notes of the comparison, and a problem for each exceeded or unchecked limit."""
        from dpbench.show.comparison import exceeded_lines

        self.notes += comparison.notes
        for missing in comparison.unjudged:
            self.problem(str(missing))
        for line in exceeded_lines(comparison.regressions):
            self.problem(line)

    def finish(self, *, complete: bool) -> None:
        """Check the limits if they are unchecked, write all files, and close the run's file.

        Args:
            complete: True if everything requested has been measured.
        """
        if self._checked is None:
            self.check_limits(complete=complete)
        outcomes = self.store.outcomes()
        if self.comparison and (late := outcomes[self._checked :]):
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
        if self.comparison is not None:
            tables += comparison_tables(self.comparison, "Change: ", self.reference.name)
        return tables

    @property
    def failed(self) -> bool:
        """True if a case failed or there is a problem, such as an exceeded limit."""
        return bool(self.problems) or any(outcome.error for outcome in self.store.outcomes())

    def close(self) -> None:
        """Remove the directory through which the processes of the session shared outcomes."""
        self.store.close()


@dataclass(frozen=True)
class SavedRun:
    """What tells whether a saved run is the reference of something."""

    path: Path
    name: str
    verdict: str
    sources: frozenset[tuple[str, str]]
    places: frozenset[tuple[Subject, str]]


class References:
    """The saved runs with which a session is compared. A process reads each of them once.

    Args:
        settings: the session's settings.
        sources: pairs of a device and an instrument, from which the session can have rows.
        files: the writer of the session's own run, which is no reference.
    """

    def __init__(
        self, settings: Settings, sources: Sequence[tuple[str, str]], files: RunWriter
    ) -> None:
        self.settings, self.sources, self.files = settings, sources, files
        self.skipped: list[str] = []
        """Messages on files that cannot be read."""
        self._known: dict[Path, list[SavedRun]] = {}
        self._load = lru_cache(maxsize=2)(Run.load)

    @cached_property
    def named(self) -> Run | None:
        """The run that the user names, or None for the latest that passed."""
        if not (compare := self.settings.compare):
            return None
        file = self.settings.directory / compare
        named = str(file) if not compare.isdecimal() and file.exists() else compare
        return Run.load(Storage(self.settings.storage).find(named))

    @cached_property
    def paths(self) -> list[Path]:
        """Files of saved runs on the session's devices, the newest run first."""
        devices = {device for device, _ in self.sources}
        paths = Storage(self.settings.storage).candidates(devices)
        return [path for path in paths if path != self.files.path]

    def _runs(self) -> Iterator[SavedRun]:
        """Yield the runs that can be read, the newest first."""
        for path in self.paths:
            if path not in self._known:
                self._known[path] = [
                    SavedRun(
                        path, run.name, run.verdict, frozenset(run.sources), frozenset(run.places)
                    )
                    for run in readable([path], self._load, self.skipped)
                ]
            yield from self._known[path]

    def _having(self, asked: Asked) -> Iterator[SavedRun]:
        """Yield the runs with a row of the session's sources and of what is asked for, if any."""
        for run in self._runs():
            fits = not run.sources.isdisjoint(self.sources)
            if fits and not (asked and run.places.isdisjoint(asked)):
                yield run

    def of(self, asked: Asked) -> Run:
        """Return the run with which these subjects are compared.

        This is the run that the user names. If the user names no run, this is the latest complete
        run that passed its limits and has rows of any of the subjects from one of ``sources``. If
        no run qualifies, this is a run without rows.
        """
        if self.named:
            return self.named
        passed = (run for run in self._having(asked) if run.verdict == COMPLETE)
        return next((self._load(run.path) for run in passed), Run.of("the storage"))

    def steps_of(self, test: str) -> set[Subject]:
        """Return the test's own steps in the run with which they are compared."""
        passed = (run for run in self._runs() if run.verdict == COMPLETE)
        for run in [self.named] if self.named else passed:
            if known := {case for case, _ in run.places if case.id.startswith(f"{test}:")}:
                return known
        return set()

    def check(self, planned: Asked, *, limits: bool) -> None:
        """Raise `ConfigurationError` if the session cannot be compared as the settings request.

        A run that the user named must have been measured on a device and with an instrument that
        the session uses. With ``--dpbench-compare-across``, the device can be another one. Limits
        need a reference run, unless the user accepts that this is the first run.
        """
        settings, across = self.settings, self.settings.compare_across
        if self.named:
            option = "--dpbench-compare-across" if settings.of_pytest else ""
            check_comparable(self.named, self.sources, "this session", across=across, option=option)
            return
        if not limits or settings.compare_first_run_ok:
            return
        if self.of(planned).frame.empty if planned else not self.paths:
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            with_cases = " with any of these cases" if planned else ""
            raise ConfigurationError(
                f"no saved run on {devices}{with_cases} in {settings.storage}, so limits cannot be "
                f"checked; add {settings.option('compare_first_run_ok')} to the first run"
            )

    def judge(self, after: Run, asked: Asked, limits: Sequence[Limit], *, idle: bool) -> Judgement:
        """Check limits on what a test or a plan has measured.

        With ``--compare-first-run-ok``, a number that the reference lacks is compared with the
        latest older run that has it.

        Args:
            after: what was measured.
            asked: what should have been measured.
            limits: the limits.
            idle: whether limits for which there is no number at all are accepted.
        """
        from dpbench.results.gate import Gate

        across, first_run_ok = self.settings.compare_across, self.settings.compare_first_run_ok
        newest = Gate(self.of(asked), after, asked, across, first_run_ok)
        if first_run_ok and not self.named:
            parts = [part for limit in limits for part in self._by_number(newest, limit)]
        else:
            parts = [newest.judge(limits, idle=True)]
        found = Judgement.merge(parts)
        if not idle:
            found.unjudged.extend([*newest.idle(limits, found)])
        if newest.before.frame.empty:
            option = self.settings.option("compare_first_run_ok")
            remedy = f" (if this is the first run, add {option})"
            found.unjudged[:] = [replace(each, why=each.why + remedy) for each in found.unjudged]
        return found

    def _by_number(self, newest: Gate, limit: Limit) -> Iterator[Judgement]:
        """Check a limit on each number by the latest run that has the number.

        Runs that did not pass are the last to be looked at, the oldest first: a case that no run
        that passed has was new in the oldest of them.
        """
        new = {key for key, known in newest.numbers(limit).items() if not known}
        left = {*(newest.asked or ())}
        others: list[SavedRun] = []

        def older() -> Iterator[SavedRun]:
            for run in self._runs():
                if run.verdict == COMPLETE:
                    yield run
                else:
                    others.append(run)
            yield from reversed(others)

        for run in older() if new else ():
            if not new.isdisjoint(run.places):
                gate = replace(newest, before=self._load(run.path), asked=new)
                if known := {key for key, found in gate.numbers(limit).items() if found}:
                    yield replace(gate, asked=known).judge([limit], idle=True)
                    new, left = new - known, left - known
            if not new:
                break
        if new and self.skipped:
            names = sorted({case.id for case, _ in new})
            why = f"may be in a run that was {self.skipped[0]}; remove this file if it is new"
            yield Judgement(unjudged=[Unjudged(str(limit), names, why)])
        yield replace(newest, asked=left).judge([limit], idle=True)

    def notes(self, reference: Run, asked: Asked, found: Judgement) -> Iterator[str]:
        """Yield notes on files that cannot be read, and on the runs that were compared with."""
        if not self.named:
            yield from self.skipped
        if reference.frame.empty:
            for run in [run for run in self._having(asked) if run.verdict != COMPLETE][:1]:
                state = f"it is {run.verdict}; name it to compare with it"
                yield f"{run.name} is not compared, because {state}"
        by_name: dict[str, set[str]] = {}
        for row in found.judged:
            if row["reference"] != reference.name:
                by_name.setdefault(row["reference"], set()).add(subject_from(row).id)
        for name, cases in by_name.items():
            verdict = next(run.verdict for run in self._runs() if run.name == name)
            state = "" if verdict == COMPLETE else f", which is {verdict}"
            yield f"compared with {name}{state}: {', '.join(sorted(cases))}"
        if not reference.frame.empty:
            yield f"compared with {reference.name}"


class RunWriter:
    """Writes the files of a session. Each process of the session has one writer.

    Args:
        settings: the session's settings.
        view: the options of the tables.
        notes: lines that the session prints at its end. `close` adds the path of the saved run.
        problem: called with the reason if a file cannot be written.
        on_document: called with the run's document before each write of the run.
        path: the file of the saved run, if another process has opened the file.
    """

    def __init__(
        self,
        settings: Settings,
        view: TableOptions,
        notes: list[str],
        problem: Callable[[str], object],
        on_document: Hook,
        path: str | None = None,
    ) -> None:
        self.settings, self.view, self.notes, self.problem = settings, view, notes, problem
        self.path = Path(path) if path else None
        self._on_document = on_document
        self._lock = ExitStack()
        """Holds the lock on the run's file."""
        self._error: OSError | None = None

    def open(self, device: str | None, begun: Run, session: Mapping[str, Any]) -> Run:
        """Lock the file of an interrupted run, or create and lock the file of a new run.

        Args:
            device: the device on which the run is measured, see `device_of`.
            begun: the run of this session, still without outcomes.
            session: the ``session`` entry of a new file.

        Returns:
            The run of this session, which has the outcomes of the interrupted run if there is one.
        """
        settings, storage = self.settings, Storage(self.settings.storage)
        path = None
        if settings.resume:
            path = storage.interrupted(device, settings.shard, settings.save, self.notes)
        with ExitStack() as held:
            if path is not None:
                check_writable(path.parent)
                held.enter_context(storage.writing(path))  # lock the file before reading it
                begun = merge_interrupted(Run.load(path), begun)
            elif settings.save is None and not settings.autosave:
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
            else:
                name = automatic_name(begun) if settings.save is None else settings.save
                empty = as_document((), begun.environment, session)
                path = storage.allocate(name, device, json.dumps(empty))
                held.enter_context(storage.writing(path))
            self.path, self._lock = path, held.pop_all()
        return begun

    def _outputs(self, *, last: bool) -> list[tuple[str, Path]]:
        """Return the outputs to write now.

        Before the last write, these are only JSON files, so that they have the outcomes so far if
        the session is killed.
        """
        files = self.settings.files.values()
        return [f for f in files if last or f[0] == "json"]

    def wanted(self, *, last: bool) -> bool:
        """Return True if there is a file to write now."""
        return bool(self.path or self._outputs(last=last))

    def write(self, run: Run, session: Mapping[str, Any], *, last: bool) -> None:
        """Write the run and JSON files. If ``last`` is True, also write all other outputs.

        Ratios and other derived metrics are computed for the last write only, because this takes
        long.
        """
        document = {**(run.with_derived() if last else run).document, "session": deepcopy(session)}
        self._on_document(document)
        run = Run(self.path or Path("this session"), document)
        if self.path:
            self._error = None
            try:
                write_text(self.path, run.text)
            except OSError as error:
                self._error = error
        for kind, path in self._outputs(last=last):
            from dpbench.show.outputs import write_output  # imports pandas

            with reporting(self.problem):
                # JSON files do not show the file's name, so all of them can have the same text.
                named = run if kind == "json" else replace(run, path=path)
                write_output(kind, path, [named], self.view)

    def close(self) -> None:
        """Unlock the run's file and add a note with its path. Remove a file without cases."""
        if (path := self.path) is None:
            return
        cases = 0
        with self._lock, suppress(ConfigurationError, OSError):  # the file may be gone
            cases = len(Run.load(path).document.get("cases", ()))
            if not cases:
                path.unlink()
        if self._error is not None:
            self.problem(f"{in_words(self._error)}; cases in the file: {cases}")
        elif cases:
            here = Path.cwd()
            self.notes.append(f"saved {path.relative_to(here) if here in path.parents else path}")


@contextmanager
def reporting(problem: Callable[[str], object]) -> Iterator[None]:
    """Call ``problem`` with the message of a `ConfigurationError` or `OSError` in the block."""
    try:
        yield
    except ConfigurationError as error:
        problem(str(error))
    except OSError as error:
        problem(in_words(error))


def device_of(instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None) -> str | None:
    """Return the device on which instruments measure, or None if no instrument uses hardware."""
    if not any(instrument.hardware for instrument in instruments):
        return None
    return gpu.name if gpu and settings.device == "cuda" else "cpu"


def sources(
    instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None
) -> list[tuple[str, str]]:
    """Return pairs of a device and an instrument, from which a session can have rows.

    For pytest, the pair of the instrument ``logical`` is always included, because a test can count
    logical bytes with any options.
    """
    pairs = [(device_of([i], settings, gpu) or NO_HARDWARE, i.name) for i in instruments]
    return list(dict.fromkeys([*pairs, *([(NO_HARDWARE, "logical")] * settings.of_pytest)]))
