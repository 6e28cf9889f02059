"""Under which conditions a session measures, and how two sessions differ in them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from dpbench.case import Grid
from dpbench.results.run import Run

_NOT_SETTINGS = {"directory", "path", "timeout"}
"""Fields of instruments that do not change what they measure."""


@dataclass(frozen=True)
class Conditions:
    """What a session measures, with what and where; all of it plain JSON types.

    Args:
        environment: of `dpbench.results.outcome.environment`.
        started: when it began, ISO 8601 in UTC.
        grid: the values along each axis.
        settings: what each instrument was told.
        workers: xdist workers, 0 without.
        earlier_seconds: how long the session took that this one resumes, s.
        cases_asked: how many cases the session is to measure, as far as that is known.
        not_measured: why cases that were asked for have no outcome, by id.
        began: the same moment as ``started`` on the clock that nobody sets, s.
    """

    environment: Mapping[str, Any]
    started: str
    grid: Mapping[str, Any]
    settings: Mapping[str, Any]
    workers: int = 0
    earlier_seconds: float = 0.0
    cases_asked: int = 0
    not_measured: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def now(
        cls,
        environment: Mapping[str, Any],
        grid: Grid,
        instruments: Sequence[object] = (),
        workers: int = 0,
        cases_asked: int = 0,
    ) -> Conditions:
        """Those of a session that begins now, with these instruments."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        settings = {getattr(i, "name", str(i)): _settings(i) for i in instruments}
        return cls(
            environment=plain(environment),
            started=started,
            grid=plain(asdict(grid)),
            settings=plain(settings),
            workers=workers,
            cases_asked=cases_asked,
        )

    def session(self, status: str, regressions: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The ``session`` part of a document that is written now."""
        seconds = max(0.0, time.monotonic() - self.began) + self.earlier_seconds
        return {
            "started": self.started,
            "seconds": round(seconds, 1),
            "status": status,
            "regressed": bool(regressions),
            "regressions": list(regressions),
            "workers": self.workers,
            "cases_asked": self.cases_asked,
            "not_measured": dict(self.not_measured),
            "grid": dict(self.grid),
            "settings": dict(self.settings),
        }

    def differences(
        self, environment: Mapping[str, Any], session: Mapping[str, Any]
    ) -> Iterator[str]:
        """What is not as it was in a document, one phrase each: versions, GPU, code, grid."""
        here = {"grid": self.grid, "settings": self.settings}
        return _differences(_named(environment, session), _named(self.environment, here))


def differences(before: Run, after: Run) -> Iterator[tuple[list[str], list[str]]]:
    """What is not the same for two runs, one phrase each: versions, GPU, code, grid, settings.

    Cases that were written into a run later have conditions of their own. So there are several
    pairs of ids and phrases where a run was updated; the ids are empty if all cases are meant.
    What one of the two does not say is no difference.
    """
    shared = {i for _, i in before.sources} & {i for _, i in after.sources}
    for old, old_keys in _parts(before, shared):
        for new, new_keys in _parts(after, shared):
            said = [name for name in old if old[name] is not None and new.get(name) is not None]
            was, now = ({name: part[name] for name in said} for part in (old, new))
            together = {case for case, _ in old_keys & new_keys}
            if together and (found := list(_differences(was, now))):
                updated = before.updates or after.updates
                yield sorted(together) if updated else [], found


def _parts(run: Run, shared: set[str]) -> Iterator[tuple[dict[str, Any], set[tuple[str, str]]]]:
    """Each set of conditions in a run, and the case ids with the instruments measured under it.

    Instruments that the other run lacks stand for each other, under no name.
    """
    left = {(row.case.id, row.instrument) for outcome in run.outcomes for row in outcome.rows}

    def named(keys: set[tuple[str, str]]) -> set[tuple[str, str]]:
        return {(case, name if name in shared else "") for case, name in keys}

    for entry in run.updates:
        keys = {(case, name) for case, names in entry["cases"].items() for name in names} & left
        left -= keys
        settings = {"settings": entry.get("settings", {})}
        yield _named(entry["environment"], settings), named(keys)
    yield _named(run.environment, run.session), named(left)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name)} -> {new.get(name)}"


def _named(environment: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for numbers of two sessions to stand in one run, by name."""
    gpu = environment.get("gpu") or {}
    code = environment.get("code") or {}
    found = {
        "Python": environment.get("python"),
        **environment.get("versions", {}),
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver"),
        "commit": code.get("commit"),
        "uncommitted changes": _changes(code),
    }
    found |= {f"grid's {axis}": values for axis, values in session.get("grid", {}).items()}
    for instrument, settings in session.get("settings", {}).items():
        found |= {f"{instrument}'s {key}": value for key, value in settings.items()}
    return found


def _changes(code: Mapping[str, Any]) -> str | None:
    """Which changes to its commit the code had, ``"none"`` if it had none; None if unknown."""
    changes: str | None = code.get("changes")
    return changes[:12] if changes else "none" if code.get("dirty") is False else None


def _settings(instrument: object) -> dict[str, Any]:
    """The options of an instrument, metrics by their names."""
    found = {f.name: getattr(instrument, f.name) for f in fields(instrument)}  # type: ignore[arg-type]
    if "metrics" in found:
        found["metrics"] = [metric.name for metric in found["metrics"]]
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in found.items()
        if name not in _NOT_SETTINGS
    }


def plain(value: Any) -> Any:
    """The value as it comes back from a JSON file; what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str))
