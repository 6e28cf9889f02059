"""Which saved run a session is compared with, unless one is named."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.outcome import COMPLETE
from dpbench.results.run import Run

LOOKED_AT = 20
"""How many runs are read, from the newest on, to find one that has everything."""


@dataclass(frozen=True)
class Choice:
    """The reference, if there is one; ``skipped`` says which files could not be read."""

    run: Run | None
    skipped: list[str] = field(default_factory=list)


def choose(
    newest_first: Iterable[Path],
    sources: Collection[tuple[str, str]],
    asked: Collection[tuple[Case, str]] = (),
) -> Choice:
    """The newest complete run that has all that was asked; else the one that has most of it.

    Runs that did not pass a comparison of their own are passed over, so that a regression is no
    reference for the next session.

    Args:
        newest_first: run files.
        sources: each (device, instrument) of the session; a reference has at least one of them.
        asked: the cases that the session measures, each by an instrument, as far as they are
            known; if none is, the newest run counts. A run that has nothing of it is no reference.
    """
    devices = {instrument: device for device, instrument in sources}
    wanted = {
        (*(getattr(case, axis) for axis in AXES), name, devices[name])
        for case, name in asked
        if name in devices
    }
    best, most = None, 0 if wanted else -1
    skipped = []
    looked_at = 0
    for path in newest_first:
        try:
            run = Run.load(path)
        except ConfigurationError as error:
            skipped.append(f"skipped: {error}")
            continue
        if run.status != COMPLETE or run.regressed or not set(sources) & set(run.sources):
            continue
        keys = run.frame[[*AXES, "instrument", "device"]].drop_duplicates()
        shared = wanted & set(keys.itertuples(index=False, name=None))
        if len(shared) > most:
            best, most = run, len(shared)
        looked_at += 1
        if shared == wanted or looked_at == LOOKED_AT:
            break
    return Choice(best, skipped)
