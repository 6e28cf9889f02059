"""Compares a session with its reference, and applies limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpbench.core.case import Subject, subject_from
from dpbench.core.errors import ConfigurationError
from dpbench.results.run import Run
from dpbench.results.storage import Storage, check_comparable, reference
from dpbench.run_writer import RunWriter, reporting
from dpbench.session_store import SessionStore

if TYPE_CHECKING:
    from dpbench.core.settings import Settings
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Unjudged, Verdict

Keys = list[tuple[Subject, str]]
"""Cases, each by an instrument."""


class Failure(NamedTuple):
    """Why a test fails: rows that got worse, and what its own limits did not judge."""

    regressions: list[dict[str, Any]]
    unjudged: Sequence[Unjudged] = ()


class SessionJudging(ABC):
    """The part of a `dpbench.session.Session` that compares it; its process judges once."""

    settings: Settings
    sources: list[tuple[str, str]]
    limits: list[Threshold]
    notes: list[str]
    store: SessionStore
    files: RunWriter
    verdict: Verdict | None
    _planned: Keys
    _judged: int

    @property
    @abstractmethod
    def begun(self) -> Run:
        """The run before its first case."""

    @property
    @abstractmethod
    def run(self) -> Run:
        """The session so far."""

    @abstractmethod
    def problem(self, text: str) -> None:
        """Add a problem, once."""

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
            whose = "this session measures"
            check_comparable(self.reference, self.sources, whose, across=across, option=option)
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
        run = reference(self._candidates, self.sources, self.asked, notes)
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


def read_limits(texts: Sequence[str]) -> list[Threshold]:
    """The limits that a user wrote."""
    if not texts:
        return []
    from dpbench.results.compare import Threshold  # loads pandas

    return [Threshold.parse(text) for text in texts]
