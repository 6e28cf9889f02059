"""What each case of a session is compared with: one named run, or its newest good measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.compare import compare
from dpbench.results.frame import CONFIGURATION, to_frame
from dpbench.results.outcome import COMPLETE
from dpbench.results.run import Run

KEY = [*AXES, "device", "instrument"]
"""The columns that say what has a reference of its own: a case, by an instrument on a device."""

SHOWN = 10
"""How many cases a line names before it only counts them."""


class References:
    """The runs that the cases of a session are compared with.

    Unless one is named, each case has, for each device and instrument, the newest complete run
    that did not regress and has its rows: a case that failed in a run, or was not in it, keeps
    an older reference. Runs are read as far back as cases need it.

    Args:
        files: run files, newest first, and when each was last written; see `as_they_are`. One
            that is written later, because a session goes on with it, is no reference, so that all
            processes of a session choose the same one.
        named: whether the first of them is the one that counts, whatever became of it.
    """

    def __init__(self, files: Mapping[Path, int], *, named: bool = False) -> None:
        self.files = dict(files)
        self.named = named
        self.skipped: list[str] = []
        """Why files were passed over so far."""
        self.own: Path | None = None
        """The session's own file, which is never its reference, not even when it is complete."""
        self._load: Callable[[Path], Run] = lru_cache(maxsize=8)(Run.load)
        self._unread = iter(self.files)
        self._newest: dict[tuple[object, ...], Path] = {}

    @classmethod
    def to(cls, run: Run) -> References:
        """One run that was named, as it is now: its file may be rewritten."""
        found = cls(as_they_are([run.path]), named=True)
        found._load = lambda path: run
        return found

    def changes(self, after: pd.DataFrame, *, across: bool = False) -> pd.DataFrame:
        """What became of each case of a long table since its reference.

        Args:
            after: a long table.
            across: see `compare`; only a named run is on other devices or by other instruments.

        Returns:
            The rows of `compare`, with the name of the run that each was compared with as
            ``reference``. Ratios before are those of that run alone.
        """
        found = [compare(to_frame([]), after, checked=True).assign(reference="")]
        for path, keys in self.chosen(after[KEY].drop_duplicates()).items():
            run = self._load(path)
            before = run.frame.merge(after[CONFIGURATION].drop_duplicates(), on=CONFIGURATION)
            changes = compare(before, after, across=across, checked=True)
            if not self.named:
                changes = changes.merge(keys, on=KEY)
            found.append(changes.assign(reference=run.name))
        full = [changes for changes in found if not changes.empty]
        return pd.concat(full, ignore_index=True) if full else found[0]

    def chosen(self, keys: pd.DataFrame) -> dict[Path, pd.DataFrame]:
        """The run file for each of these keys that has one, with the keys."""
        if self.named:
            return {next(iter(self.files)): keys}
        chosen: dict[Path, list[tuple[object, ...]]] = {}
        for key in keys.itertuples(index=False, name=None):
            if path := self._find(key):
                chosen.setdefault(path, []).append(key)
        return {path: pd.DataFrame(found, columns=KEY) for path, found in chosen.items()}

    def _find(self, key: tuple[object, ...]) -> Path | None:
        """The newest good run with rows of this key."""
        while key not in self._newest:
            path = next(self._unread, None)
            if path is None:
                return None
            if _written(path) != self.files[path]:
                continue
            try:
                run = self._load(path)
            except ConfigurationError as error:
                self.skipped.append(f"skipped: {error}")
                continue
            if run.status == COMPLETE and not run.regressed and path != self.own:
                for there in run.frame[KEY].drop_duplicates().itertuples(index=False, name=None):
                    self._newest.setdefault(there, path)
        return self._newest[key]


def as_they_are(paths: Iterable[Path]) -> dict[Path, int]:
    """Files, and when each was last written, in ns."""
    return {path: _written(path) for path in paths}


def _written(path: Path) -> int:
    """When a file was last written, in ns; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:  # reading it says what is wrong
        return 0


def keys_of(cases: Iterable[object], sources: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """The keys of cases that each of these (device, instrument) is to measure."""
    pairs = list(sources)
    rows = [{**vars(case), "device": d, "instrument": i} for case in cases for d, i in pairs]
    return pd.DataFrame(rows, columns=KEY)


def alone(after: pd.DataFrame, changes: pd.DataFrame, *, across: bool = False) -> list[str]:
    """The cases of a long table that nothing in a comparison is about, each as one phrase.

    A case that some instruments found a reference for is named with the others.
    """
    columns = list(AXES) if across else [*AXES, "instrument"]
    compared = set(changes[columns].itertuples(index=False, name=None))
    missing: dict[tuple[Any, ...], list[str]] = {}
    for key in after[columns].drop_duplicates().itertuples(index=False, name=None):
        if key not in compared:
            missing.setdefault(key[: len(AXES)], []).extend(map(str, key[len(AXES) :]))
    with_some = {key[: len(AXES)] for key in compared}
    return [
        Case(*axes).id + (f" ({', '.join(names)})" if axes in with_some else "")
        for axes, names in missing.items()
    ]


def alone_in_words(cases: Sequence[str]) -> str:
    """One line that counts and names cases which found nothing to compare with."""
    count = f"{len(cases)} case{'s' if len(cases) > 1 else ''}"
    return f"nothing to compare {count} with: {listed(cases)}"


def ungated_in_words(cases: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each threshold that some cases were not judged by; see `ungated`."""
    return [
        f"{threshold} judged nothing of {listed(names)}: not in what they are compared with"
        for threshold, names in cases.items()
    ]


def listed(names: Sequence[str]) -> str:
    """Names for one line, which says how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
