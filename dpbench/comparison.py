"""What a session is compared with, and judged by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from dpbench.case import Case
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import CasesAsked, Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.run import Run
    from dpbench.settings import Settings
    from dpbench.show.layout import Table


class Comparison:
    """The reference and the limits of a session.

    Args:
        settings: what was asked for.
        sources: each (device, instrument) that the session can have rows of.
    """

    def __init__(self, settings: Settings, sources: Sequence[tuple[str, str]]) -> None:
        self.settings = settings
        self.sources = sources
        self.limits = limits(settings.compare_fail)
        """Those of the command line; tests may have their own."""
        self.named: Path | None = None
        self.candidates: list[Path] | None = None
        """Files that may be the reference, newest first; None until they are needed."""
        self.asked: list[tuple[Case, str]] = []
        """What the session is known to ask for: the reference should have it."""
        self.tests: list[str] = []
        """The ids of tests and modules that ask by name: the reference should know them."""
        self.tables: list[Table] = []
        self.notes: list[str] = []
        """What the end of the session says; the session adds to it."""

    def begin(self) -> None:
        """Find the run that was named, or those of which one may be the reference."""
        settings = self.settings
        if not settings.compares:
            return
        if settings.compare:
            from dpbench.results.compare import check_comparable
            from dpbench.results.storage import Storage

            path = settings.directory / settings.compare
            named = settings.compare if settings.compare.isdecimal() else str(path)
            self.named = Storage(settings.storage).find(named)
            check_comparable(
                self.reference,
                self.sources,
                "this session measures",
                across=settings.compare_across,
                option="--dpbench-compare-across" if settings.of_pytest else "",
            )
            return
        self.candidates = self._saved()
        if not self.limits or settings.compare_first_run_ok:
            return
        lacking = ""
        if self.asked and self.reference.frame.empty:
            names = " or ".join(dict.fromkeys(name for _, name in self.asked))
            lacking = f"complete run in {settings.storage} has any of these cases by {names}"
        elif not self.candidates:
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            lacking = f"saved run on {devices} in {settings.storage}"
        if lacking:
            raise ConfigurationError(
                f"no {lacking} to judge by; if this is the first, say "
                f"{settings.option('compare_first_run_ok')}"
            )

    def _saved(self) -> list[Path]:
        from dpbench.results.storage import Storage

        return Storage(self.settings.storage).candidates({device for device, _ in self.sources})

    @cached_property
    def reference(self) -> Run:
        """What the session is compared with; without rows if there is nothing."""
        from dpbench.results.run import Run
        from dpbench.results.storage import choose

        if self.named is not None:
            return Run.load(self.named)
        if self.candidates is None:  # only a test's own limits ask for it
            self.candidates = self._saved()
        run, skipped = choose(self.candidates, self.sources, self.asked, self.tests)
        self.notes += skipped
        return run or Run.of("the storage")

    def asked_before(self, tests: str, by: Collection[str]) -> list[tuple[Case, str]]:
        """What a test, or those of a module, asked these instruments for in the reference."""
        return [
            (case, name)
            for test, asked in self.reference.tests.items()
            for case, name in asked
            if f"{test}::".startswith(f"{tests}::") and name in by
        ]

    def judge(self, after: Run, limits: Sequence[Threshold], asked: CasesAsked) -> Verdict:
        """What was measured against the reference, by these limits. Only here is judged."""
        from dpbench.results.gate import Gate

        across, first_run_ok = self.settings.compare_across, self.settings.compare_first_run_ok
        return Gate(self.reference, after, {*asked}, across, first_run_ok).judge(limits)

    def show(self, verdict: Verdict) -> None:
        """What the end of the session shows of it."""
        from dpbench.show.comparison import comparison_tables

        if not self.reference.frame.empty:
            self.notes.append(f"compared with {self.reference.name}")
        self.notes += verdict.notes
        self.tables = comparison_tables(verdict, "Change: ", self.reference.name)

    @property
    def remedy(self) -> str:
        """What helps where there is nothing to compare with."""
        if not self.reference.frame.empty:
            return ""
        option = self.settings.option("compare_first_run_ok")
        return f" (if this is the first run, say {option})"


def asked_for(outcomes: Sequence[Outcome]) -> list[tuple[Case, str]]:
    """These cases by the instruments that were to measure them."""
    return [(outcome.case, name) for outcome in outcomes for name in outcome.instruments]


def limits(texts: Sequence[str]) -> list[Threshold]:
    """Limits as their user wrote them."""
    if not texts:
        return []
    from dpbench.results.compare import Threshold  # loads pandas

    return [Threshold.parse(text) for text in texts]
