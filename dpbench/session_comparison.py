"""Compares a session with its reference run, and checks limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpbench.core.errors import ConfigurationError
from dpbench.core.subject import Subject, subject_from
from dpbench.results.outcome import COMPLETE
from dpbench.results.run import Run
from dpbench.results.storage import Storage, check_comparable, latest_passed_run, readable
from dpbench.session_files import RunWriter, reporting
from dpbench.session_store import Keys, SessionStore

if TYPE_CHECKING:
    from dpbench.core.settings import Settings
    from dpbench.results.compare import Limit, Unjudged, Verdict
    from dpbench.results.gate import Gate

    Numbers = set[tuple[Limit, tuple[Subject, str]]]


class Failure(NamedTuple):
    """The reasons why a test fails: values that exceed limits, and limits that were not checked."""

    regressions: list[dict[str, Any]]
    unjudged: Sequence[Unjudged] = ()


class SessionComparison:
    """The comparison of a session with its reference run.

    Args:
        settings: the session's settings.
        store: the outcomes and requests of the session.
        planned: the cases and instruments of the session's plan; empty if tests request the cases.
        sources: pairs of a device and an instrument, from which the session can have rows.
        files: the writer of the session's own run, to which notes and problems are added.
    """

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        planned: Keys,
        sources: Sequence[tuple[str, str]],
        files: RunWriter,
    ) -> None:
        self.settings, self.store, self.files = settings, store, files
        self.planned, self.sources = planned, sources
        self.limits = read_limits(settings.compare_fail)
        """The limits on the command line. The marker of a test can replace them for the test."""
        self.verdict: Verdict | None = None
        """The result of the last call of `check_limits`; None before a comparison."""
        self.judged = 0
        """The number of outcomes at the time of the last comparison."""

    @property
    def requested(self) -> Keys:
        """Pairs of a case and an instrument, from the plan and from the requests of tests."""
        of_tests = (key for request in self.store.requests for key in request.asked)
        return [*dict.fromkeys([*self.planned, *of_tests])]

    def check_reference(self) -> None:
        """Raise `ConfigurationError` if the session cannot be compared as the settings request.

        A run that the user named must have been measured on a device and with an instrument that
        the session uses. With ``--dpbench-compare-across``, the device can be another one. Limits
        need a reference run, unless the user accepts that this is the first run.
        """
        settings, across = self.settings, self.settings.compare_across
        if settings.compare:
            option = "--dpbench-compare-across" if settings.of_pytest else ""
            name = "this session"
            check_comparable(self.reference, self.sources, name, across=across, option=option)
            return
        if not self.limits or settings.compare_first_run_ok:
            return
        if self.reference.frame.empty if self.planned else not self._candidates:
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            with_cases = " with any of these cases" if self.planned else ""
            raise ConfigurationError(
                f"no saved run on {devices}{with_cases} in {settings.storage}, so limits cannot be "
                f"checked; add {settings.option('compare_first_run_ok')} to the first run"
            )

    @cached_property
    def _candidates(self) -> list[Path]:
        """Files of saved runs on the session's devices, the newest run first."""
        devices = {device for device, _ in self.sources}
        paths = Storage(self.settings.storage).candidates(devices)
        return [path for path in paths if path != self.files.path]

    @cached_property
    def reference(self) -> Run:
        """The run to compare with.

        This is the run that the user names. If the user names no run, this is the latest complete
        run that passed its limits and has rows from one of ``sources``. If the requested cases are
        known, the run must also have one of them. If no run qualifies, this is a run without rows.
        """
        settings, notes = self.settings, list[str]()
        if settings.compare:
            is_number = settings.compare.isdecimal()
            named = settings.compare if is_number else str(settings.directory / settings.compare)
            return Run.load(Storage(settings.storage).find(named))
        run = latest_passed_run(self._candidates, self.sources, self.requested, notes)
        if run is None and settings.compare_first_run_ok:
            for note in (note for note in notes if note.startswith("skipped")):
                option = settings.option("compare_first_run_ok")
                raise ConfigurationError(f"{option}: this is not the first run; {note}")
        self.files.notes += notes
        return run or Run.of("the storage")

    def _older_runs(self, skipped: list[str]) -> Iterator[Run]:
        """Yield the runs that passed, the newest first, then all others, the oldest first.

        A case that no run that passed has was new in the oldest of the others.
        """
        others: list[Path] = []
        for run in readable(self._candidates, Run.load, skipped):
            if run.verdict == COMPLETE:
                yield run
            else:
                others.append(run.path)
        yield from readable(reversed(others), Run.load, [])

    def _older_gates(self, newest: Gate, limits: Iterable[Limit]) -> list[tuple[Gate, Numbers]]:
        """Return gates with older runs, each with the numbers that newer references lack.

        Only with ``--compare-first-run-ok``. Without it, a number that the reference lacks fails.
        """
        older: list[tuple[Gate, Numbers]] = []
        if self.settings.compare or not self.settings.compare_first_run_ok:
            return older
        new = {
            (limit, key) for limit in limits for key, old in newest.cases(limit).items() if not old
        }
        skipped: list[str] = []
        for run in self._older_runs(skipped) if new else ():
            known = {(each, key) for each, key in new if key in run.places}
            gate = replace(newest, before=run, asked={key for _, key in known})
            if found := {(each, key) for each, key in known if gate.cases(each).get(key)}:
                older.append((replace(gate, asked={key for _, key in found}), found))
                new -= found
                state = "" if run.verdict == COMPLETE else f", which is {run.verdict}"
                self.files.notes.append(f"compared with {run.name}{state}: {_names(found)}")
        if new and skipped:
            lost = f"{_names(new)} may be in a run that was {skipped[0]}"
            self.files.problem(f"{lost}; remove this file if the cases are new")
        return older

    @property
    def remedy(self) -> str:
        """A hint for messages about a missing reference run; empty if there is a reference run."""
        if not self.reference.frame.empty:
            return ""
        option = self.settings.option("compare_first_run_ok")
        return f" (if this is the first run, add {option})"

    def check_limits(
        self, run: Callable[[], Run], *, complete: bool, passed: Collection[str]
    ) -> dict[str, Failure]:
        """Compare the session with its reference run, and check the limits.

        Args:
            run: returns the session's run. Called only if there is something to compare.
            complete: True if everything requested has been measured.
            passed: the ids of the tests that have passed.

        Returns:
            The reasons for failure, by the ids of tests whose limits failed or were not checked.
        """
        failures: dict[str, Failure] = {}
        with reporting(self.files.problem):
            limited, own = self._limited(passed)
            outcomes = self.store.outcomes()
            if not (own or (self.settings.compares and (outcomes or self.limits))):
                return {}
            from dpbench.results.compare import Verdict
            from dpbench.results.gate import Gate

            across, first_run_ok = self.settings.compare_across, self.settings.compare_first_run_ok
            asked = {*self.requested, *(key for outcome in outcomes for key in outcome.asked)}
            newest = Gate(self.reference, run(), asked, across, first_run_ok)
            texts = [*self.settings.compare_fail, *(each for _, texts in own for each in texts)]
            older = self._older_gates(newest, read_limits([*dict.fromkeys(texts)]))

            def judge(limits: Sequence[Limit], keys: set[tuple[Subject, str]]) -> Verdict:
                verdicts = [newest.check_limits()]
                for limit in limits:
                    left = keys
                    for gate, numbers in older:
                        if inside := {key for key in left if (limit, key) in numbers}:
                            verdicts.append(gate.check_limits([limit], inside))
                            left = left - inside
                    if left == keys or not left.isdisjoint(newest.cases(limit)):
                        verdicts.append(newest.check_limits([limit], left))
                return Verdict.merge(verdicts)

            verdict = judge(self.limits, {key for keys in limited.values() for key in keys})
            if self.limits and not complete:
                verdict.unjudged.clear()
                self.files.problem(
                    f"the session ended early, so {self.settings.option('compare_fail')} was not "
                    f"checked for every requested case"
                )
            for test, keys in limited.items():
                rows = [
                    r for r in verdict.regressions if (subject_from(r), r["instrument"]) in keys
                ]
                failures[test] = Failure(rows)
            verdicts = [verdict]
            for (test, limits), keys in own.items():
                verdicts.append(judge(read_limits(limits), {*keys}))
                failures[test] = Failure(verdicts[-1].regressions, verdicts[-1].unjudged)
            self.verdict = Verdict.merge(verdicts)
            self.judged = len(outcomes)
            self._report(self.verdict)
        measured = {r.test for r in self.store.requests if r.params is not None} | {*passed}
        return {
            test: failures[test] for test in failures if test in measured and any(failures[test])
        }

    def _limited(self, passed: Collection[str]) -> tuple[dict[str, Keys], dict[Any, Keys]]:
        """Return the pairs of a case and an instrument to which limits apply.

        The first dictionary is for the limits on the command line. Its keys are test ids, and ""
        for the plan and for requests of hooks. The second dictionary is for limits of markers. Its
        keys are pairs of a test id and the limits.
        """
        limited: dict[str, Keys] = {"": [*self.planned]}
        own: dict[tuple[str, tuple[str, ...]], Keys] = {}
        for request in self.store.requests:
            if request.limits is None:
                limited.setdefault(request.test, []).extend(request.asked)
            elif request.limits and (request.asked or request.test in passed):
                own.setdefault((request.test, request.limits), []).extend(request.asked)
        return limited, own

    def _report(self, verdict: Verdict) -> None:
        """Add a problem for each exceeded or unchecked limit, and the notes of the comparison."""
        from dpbench.show.comparison import exceeded_lines

        if not self.reference.frame.empty:
            self.files.notes.append(f"compared with {self.reference.name}")
        self.files.notes += verdict.notes
        for missing in verdict.unjudged:
            self.files.problem(f"{missing}{self.remedy}")
        for line in exceeded_lines(verdict.regressions):
            self.files.problem(line)


def _names(numbers: Numbers) -> str:
    return ", ".join(sorted({case.id for _, (case, _) in numbers}))


def read_limits(texts: Sequence[str]) -> list[Limit]:
    """Read limits such as ``dram_bytes:5%``. Without limits, pandas is not imported."""
    if not texts:
        return []
    from dpbench.results.compare import Limit

    return [Limit.parse(text) for text in texts]
