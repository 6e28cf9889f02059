"""Which saved run a session is compared with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, islice
from pathlib import Path

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.results.outcome import COMPLETE
from dpbench.results.run import Run
from dpbench.results.storage import Storage, readable
from dpbench.settings import Settings

LOOKED_AT = 20
"""How many comparable runs are read, from the newest on, to find the reference."""


class Reference:
    """The run that a session is compared with: the one that was named, or what `choose` finds.

    Args:
        settings: what was asked for.
        sources: each (device, instrument) that the session can have rows of.
        notes: lines for the end of the session; files that could not be read are added.
        files: the candidates that another process of the session has found.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Collection[tuple[str, str]],
        notes: list[str],
        files: Sequence[str] | None = None,
    ) -> None:
        self.settings, self.sources, self.notes = settings, sources, notes
        self.files = files
        """The run that was named, or the candidates, newest first; None until needed."""
        self._run: Run | None = None

    def find(self, asked: Collection[tuple[Case, str]], *, must_exist: bool) -> None:
        """Find the run that was named, or the candidates.

        Args:
            asked: the cases that the session measures, each by an instrument, as far as known.
            must_exist: whether limits need it.
        """
        settings = self.settings
        if settings.compare:
            path = settings.directory / settings.compare
            named = settings.compare if settings.compare.isdecimal() else str(path)
            self.files = [str(Storage(settings.storage).find(named))]
            option = "--dpbench-compare-across" if settings.of_pytest else ""
            check_comparable(
                self.run(),
                self.sources,
                "this session measures",
                across=settings.compare_across,
                option=option,
            )
            return
        candidates = self.candidates()
        if must_exist and (self.run(asked).frame.empty if asked else not candidates):
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            with_cases = " has any of these cases" if asked else ""
            raise ConfigurationError(
                f"no saved run on {devices} in {settings.storage}{with_cases} to judge by; if this "
                f"is the first, say {settings.option('compare_first_run_ok')}"
            )

    def candidates(self) -> list[Path]:
        """The run that was named, or all that may be the reference, newest first."""
        if self.files is None:
            devices = {device for device, _ in self.sources}
            self.files = [*map(str, Storage(self.settings.storage).candidates(devices))]
        return [*map(Path, self.files)]

    def run(
        self,
        asked: Collection[tuple[Case, str]] = (),
        tests: Collection[str] = (),
        chosen: str | None = None,
    ) -> Run:
        """The run, chosen when it is needed first; without rows if there is none.

        Args:
            asked: the cases that it should have, each by an instrument.
            tests: the ids of tests and modules that it should have measured for.
            chosen: the file that another process has chosen.
        """
        if self._run is None and (self.settings.compare or chosen):
            self._run = Run.load(Path(chosen or self.candidates()[0]))
        elif self._run is None:
            run, skipped = choose(self.candidates(), self.sources, asked, tests)
            self.notes += skipped
            self._run = run or Run.of("the storage")
        return self._run


def check_comparable(
    before: Run, after: Collection[tuple[str, str]], name: str, *, across: bool, option: str
) -> None:
    """Refuse to compare what different devices measured, or runs without a common instrument.

    ``after`` has each (device, instrument) of what is compared, which is called ``name``; with
    ``across``, which ``option`` asks for, the devices may differ.
    """
    old, new = set(before.sources), set(after)
    shared = {by for _, by in old} & {by for _, by in new}
    if shared and (across or {by for _, by in old & new} == shared):
        return
    there, here = (
        "; ".join(f"{by} on {device}" for device, by in side) or "nothing"
        for side in (before.sources, after)
    )
    remedy = f"; {option} does it all the same" if shared and option else ""
    raise ConfigurationError(f"{before.path} holds {there}, {name} {here}: not compared{remedy}")


def choose(
    newest_first: Iterable[Path],
    sources: Collection[tuple[str, str]],
    asked: Collection[tuple[Case, str]] = (),
    tests: Collection[str] = (),
) -> tuple[Run | None, list[str]]:
    """The comparable run that has most of what is asked for, the newest of equals.

    Comparable are runs that are complete, passed their own comparison, and have at least one of
    the ``sources``. If cases are ``asked`` for, a run with nothing of them is no reference. A
    newer run of fewer ``tests`` does not replace a whole one: what it lacks could not be judged.
    Also returns which files could not be read.
    """
    wanted, named, skipped = {*asked}, {*tests}, list[str]()

    def shared(run: Run) -> int:
        known = {(case, name) for case, by in run.places.items() for name in by}
        of_tests = sum(not _with_modules(test).isdisjoint(named) for test in run.tests)
        return len(wanted & known) + of_tests

    comparable = (
        run
        for run in readable(newest_first, Run.load, skipped)
        if run.status == COMPLETE and not run.regressed and {*sources} & {*run.sources}
    )
    best = max(islice(comparable, LOOKED_AT), key=shared, default=None)
    return (None if best and wanted and not shared(best) else best), skipped


def _with_modules(test: str) -> set[str]:
    """The ids of a test, and of the module and classes that it is in."""
    return {*accumulate(test.split("::"), "{}::{}".format)}
