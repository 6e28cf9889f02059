"""Which saved run a session is compared with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.results.outcome import COMPLETE
from dpbench.results.run import Run
from dpbench.results.storage import Storage, readable
from dpbench.settings import Settings

LOOKED_AT = 20
"""How many runs are read, from the newest on, to find a reference that has everything."""


class Reference:
    """The run that a session is compared with: one that was named, or one that has what it asks.

    Args:
        settings: what was asked for.
        sources: each (device, instrument) that the session can have rows of.
        notes: what the end of the session says; also, which runs could not be read.
        files: what another process of the session has found.
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
        """The run that was named, or those that may be it, newest first; None until needed."""
        self._run: Run | None = None

    def find(self, asked: Collection[tuple[Case, str]], *, must_exist: bool) -> None:
        """Find the run that was named, or those of which one may be it.

        Args:
            asked: the cases that the session measures, each by an instrument, as far as known.
            must_exist: whether limits need it.
        """
        settings = self.settings
        if settings.compare:
            path = settings.directory / settings.compare
            named = settings.compare if settings.compare.isdecimal() else str(path)
            self.files = [str(Storage(settings.storage).find(named))]
            check_comparable(
                self.run(),
                self.sources,
                "this session measures",
                across=settings.compare_across,
                option="--dpbench-compare-across" if settings.of_pytest else "",
            )
            return
        self._look()
        lacking = ""
        if must_exist and asked and self.run(asked).frame.empty:
            names = " or ".join(dict.fromkeys(name for _, name in asked))
            lacking = f"complete run in {settings.storage} has any of these cases by {names}"
        elif must_exist and not self.files:
            devices = " or ".join(sorted({device for device, _ in self.sources}))
            lacking = f"saved run on {devices} in {settings.storage}"
        if lacking:
            raise ConfigurationError(
                f"no {lacking} to judge by; if this is the first, say "
                f"{settings.option('compare_first_run_ok')}"
            )

    def _look(self) -> Iterable[Path]:
        if self.files is None:
            devices = {device for device, _ in self.sources}
            self.files = [*map(str, Storage(self.settings.storage).candidates(devices))]
        return map(Path, self.files)

    def run(
        self,
        asked: Collection[tuple[Case, str]] = (),
        tests: Collection[str] = (),
        chosen: str | None = None,
    ) -> Run:
        """The run, chosen when it is needed first; without rows if there is none.

        Args:
            asked: what it should have.
            tests: the ids of tests and modules that it should know, for they ask by name.
            chosen: the file that another process has chosen.
        """
        if self._run is None and (self.settings.compare or chosen):
            self._run = Run.load(Path(chosen or next(iter(self._look()))))
        elif self._run is None:
            run, skipped = choose(self._look(), self.sources, asked, tests)
            self.notes += skipped
            self._run = run or Run.of("the storage")
        return self._run


def check_comparable(
    before: Run, after: Collection[tuple[str, str]], name: str, *, across: bool, option: str
) -> None:
    """Refuse to compare numbers with different premises.

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
    """The newest complete run that has all that was asked; else the one that has most of it.

    Also returns which files could not be read. Runs that did not pass a comparison of their own
    are passed over, so that a regression is no reference for the next session.

    Args:
        newest_first: run files.
        sources: each (device, instrument) of the session; a reference has at least one of them.
        asked: the cases that the session measures, each by an instrument, as far as they are
            known; if none is, the newest run counts. A run that has nothing of it is no reference.
        tests: the ids of tests and modules that ask by name; a run of theirs has what they asked.
    """
    devices = {instrument: device for device, instrument in sources}
    wanted = {(case, name, devices[name]) for case, name in asked if name in devices}
    named, best, most = {*tests}, None, 0 if wanted else -1
    skipped: list[str] = []
    looked_at = 0
    for run in readable(newest_first, Run.load, skipped):
        if run.status != COMPLETE or run.regressed or not set(sources) & set(run.sources):
            continue
        shared = sum(device in run.places.get(c, {}).get(name, ()) for c, name, device in wanted)
        has_all = shared == len(wanted) and run.tests.keys() >= named
        shared += sum(not _with_modules(test).isdisjoint(named) for test in run.tests)
        if shared > most:
            best, most = run, shared
        looked_at += 1
        if has_all or looked_at == LOOKED_AT:
            break
    return best, skipped


def _with_modules(test: str) -> set[str]:
    """The ids of a test, and of the module and classes that it is in."""
    return {*accumulate(test.split("::"), "{}::{}".format)}
