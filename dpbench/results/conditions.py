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

    def session(
        self,
        status: str,
        regressions: Sequence[Mapping[str, Any]] = (),
        unjudged: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The ``session`` part of a document that is written now."""
        seconds = max(0.0, time.monotonic() - self.began) + self.earlier_seconds
        return {
            "started": self.started,
            "seconds": round(seconds, 1),
            "status": status,
            "regressed": bool(regressions or unjudged),
            "regressions": list(regressions),
            "unjudged": list(unjudged),
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


def premise_differences(before: Run, after: Run) -> list[str]:
    """What is not the same for two runs, one phrase each: versions, GPU, code, grid, settings.

    What one of the two does not say is no difference, nor is an instrument that one lacks.
    """
    old, new = (_named(run.environment, run.session) for run in (before, after))
    said = [name for name in old if old[name] is not None and new.get(name) is not None]
    said = [name for name in said if not name.startswith("grid's ")]  # its cases are named anyway
    found = list(_differences({n: old[n] for n in said}, {n: new[n] for n in said}))
    if written := {case for entry in before.updates for case in entry["cases"]}:
        found.append(
            f"of {before.name}, {len(written)} cases were written later, under other conditions"
        )
    return found


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
