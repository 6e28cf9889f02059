"""A committed reference: a run's document of which only what was measured anew is rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.results.outcome import PARTS, Outcome, belongs
from dpbench.results.run import Run
from dpbench.results.session import Premise


@dataclass(frozen=True)
class Update:
    """A reference's outcomes after an update, and how many of them are new or rewritten.

    ``written`` are the ids of these, each with the instruments whose rows are new.
    """

    outcomes: list[Outcome]
    added: int
    rewritten: int
    written: dict[str, list[str]] = field(default_factory=dict)


def check_same_device(reference: Run, outcomes: Sequence[Outcome]) -> None:
    """Refuse to mix devices in a reference.

    Raises:
        ConfigurationError: an instrument's rows are there from another device.
    """
    devices = {instrument: device for device, instrument in reference.sources}
    for outcome in outcomes:
        for row in outcome.rows:
            known = devices.get(row.instrument, row.device)
            if row.device != known:
                raise ConfigurationError(
                    f"reference {reference.path} holds {row.instrument} on {known}, "
                    f"and this is {row.device}: not updated; name another file"
                )


def updated(
    old: Sequence[Outcome], measured: Sequence[Outcome], *, new_only: bool = False
) -> Update:
    """A reference's outcomes with measured ones in their places; the others stay as they are.

    Args:
        old: the reference's.
        measured: this session's; those that failed are left out.
        new_only: leave what the reference has, and add what it lacks.
    """
    result = list(old)
    added = rewritten = 0
    written: dict[str, list[str]] = {}
    for outcome in measured:
        if outcome.error:
            continue
        names = {row.instrument for row in outcome.rows}
        same = [place for place, entry in enumerate(result) if entry.case == outcome.case]
        there = {row.instrument for place in same for row in result[place].rows}
        if new_only:
            outcome = _without(outcome, there)
            names -= there
        if not names:
            continue
        if names & there:
            rewritten += 1
        else:
            added += 1
        written[outcome.case.id] = sorted({*written.get(outcome.case.id, ()), *names})
        place = same[0] if same else len(result)
        kept = [_without(result[i], names) for i in same]
        result = [entry for i, entry in enumerate(result) if i not in same]
        result[place:place] = [entry for entry in kept if entry.rows] + [outcome]
    return Update(result, added, rewritten, written)


def history(
    earlier: Sequence[Mapping[str, Any]], written: Mapping[str, list[str]], premise: Premise
) -> list[dict[str, Any]]:
    """The ``updates`` of a reference after one more, oldest first.

    Each says under what premise which cases were written, by id with the instruments; what was
    written again since is not in it any more.
    """
    kept = []
    for entry in earlier:
        left = {
            case: [name for name in names if name not in written.get(case, ())]
            for case, names in entry["cases"].items()
        }
        if cases := {case: names for case, names in left.items() if names}:
            kept.append({**entry, "cases": cases})
    now = {
        "started": premise.started,
        "cases": dict(written),
        "environment": dict(premise.environment),
        "settings": dict(premise.settings),
    }
    return [*kept, now]


def _without(outcome: Outcome, instruments: set[str]) -> Outcome:
    """An outcome without the rows of some instruments."""
    if instruments.isdisjoint(row.instrument for row in outcome.rows):
        return outcome
    rows = tuple(row for row in outcome.rows if row.instrument not in instruments)
    left = tuple(name for name in outcome.instruments if name not in instruments)
    gone: dict[str, Any] = {part: () for part in PARTS if not belongs(part, left)}
    return replace(outcome, rows=rows, instruments=left, **gone)
