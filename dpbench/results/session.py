"""A session and its file: said before it begins, written as it goes, resumed if it broke off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpbench.case import Grid
from dpbench.errors import ConfigurationError
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome, document, write_json
from dpbench.results.run import Run
from dpbench.results.storage import Storage, automatic_name

_NOT_SETTINGS = {"directory", "path", "timeout"}
"""Fields of instruments that do not change what they measure."""


@dataclass(frozen=True)
class Premise:
    """What a session measures, with what and where; all of it plain JSON types.

    Args:
        environment: of `dpbench.results.outcome.environment`.
        started: when it began, ISO 8601 in UTC.
        grid: the values along each axis.
        settings: what each instrument was told.
        workers: xdist workers, 0 without.
        earlier_seconds: how long the session took that this one resumes, s.
        cases_asked: how many cases the session is to measure, as far as that is known.
    """

    environment: Mapping[str, Any]
    started: str
    grid: Mapping[str, Any]
    settings: Mapping[str, Any]
    workers: int = 0
    earlier_seconds: float = 0.0
    cases_asked: int = 0

    @classmethod
    def now(
        cls,
        environment: Mapping[str, Any],
        grid: Grid,
        instruments: Sequence[object] = (),
        workers: int = 0,
        cases_asked: int = 0,
    ) -> Premise:
        """The premise of a session that begins now, with these instruments."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        settings = {getattr(i, "name", str(i)): _settings(i) for i in instruments}
        return cls(
            environment=_plain(environment),
            started=started,
            grid=_plain(asdict(grid)),
            settings=_plain(settings),
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
        seconds = (datetime.now(UTC) - datetime.fromisoformat(self.started)).total_seconds()
        return {
            "started": self.started,
            "seconds": round(seconds + self.earlier_seconds, 1),
            "status": status,
            "regressed": bool(regressions or unjudged),
            "regressions": list(regressions),
            "unjudged": list(unjudged),
            "workers": self.workers,
            "cases_asked": self.cases_asked,
            "grid": dict(self.grid),
            "settings": dict(self.settings),
        }

    def differences(
        self, environment: Mapping[str, Any], session: Mapping[str, Any]
    ) -> Iterator[str]:
        """What is not as it was in a document, one phrase each: versions, GPU, code, grid."""
        here = {"grid": self.grid, "settings": self.settings}
        return _differences(_premises(environment, session), _premises(self.environment, here))


def premise_differences(before: Run, after: Run) -> list[str]:
    """What is not the same for two runs, one phrase each: versions, GPU, code, grid, settings.

    What one of the two does not say is no difference, nor is an instrument that one lacks.
    """
    old, new = (_premises(run.environment, run.session) for run in (before, after))
    said = [name for name in old if old[name] is not None and new.get(name) is not None]
    said = [name for name in said if not name.startswith("grid's ")]  # its cases are named anyway
    found = list(_differences({n: old[n] for n in said}, {n: new[n] for n in said}))
    if written := {case for entry in before.updates for case in entry["cases"]}:
        found.append(
            f"of {before.name}, {len(written)} cases were written later, by other premises"
        )
    return found


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name)} -> {new.get(name)}"


def _premises(environment: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
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
    assert is_dataclass(instrument)
    found = {f.name: getattr(instrument, f.name) for f in fields(instrument)}
    if "metrics" in found:
        found["metrics"] = [metric.name for metric in found["metrics"]]
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in found.items()
        if name not in _NOT_SETTINGS
    }


def _plain(value: Any) -> Any:
    """The value as it comes back from a JSON file; what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str))


class RunFile:
    """The file of a session that is running: whole at any moment, ``interrupted`` until its end.

    Args:
        path: the file.
        premise: of the session.
        held: what holds the file against other sessions; none in a process that only writes.
    """

    def __init__(self, path: Path, premise: Premise, held: ExitStack | None = None) -> None:
        self.path = path
        self.premise = premise
        self._held = held or ExitStack()

    @classmethod
    def create(cls, storage: Storage, name: str | None, device: str | None, p: Premise) -> RunFile:
        """A new file in a storage; without a name, commit and time are its name.

        Raises:
            ConfigurationError: the storage cannot be written, or the name is none.
        """
        if name is None:
            name = automatic_name(p.environment.get("code"), datetime.fromisoformat(p.started))
        text = json.dumps(document([], p.environment, p.session(INTERRUPTED)))
        try:
            path = storage.allocate(name, device, text)
        except OSError as error:
            raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
        try:
            return cls._hold(storage, path, p)
        except OSError as error:  # no room for the lock
            path.unlink()
            raise ConfigurationError(f"{path}: {error.strerror}") from error

    @classmethod
    def resume(cls, storage: Storage, run: Run, premise: Premise) -> tuple[RunFile, list[Outcome]]:
        """The file of an interrupted run, to go on with it.

        Returns:
            The file, and the outcomes that need not be measured again: those that did not fail.

        Raises:
            ConfigurationError: a session is writing it, versions, code, grid or settings are
                not what they were, or cases were written into it under another premise.
        """
        differences = list(premise.differences(run.environment, run.session))
        if run.updates:
            differences.append("cases were written into it by --dpbench-update")
        if differences:
            raise ConfigurationError(
                f"{run.path} cannot be resumed, for this session differs: {'; '.join(differences)}"
            )
        asked = max(run.cases_asked, premise.cases_asked)
        premise = replace(premise, earlier_seconds=run.seconds or 0.0, cases_asked=asked)
        kept = [outcome for outcome in run.outcomes if outcome.error is None]
        return cls._hold(storage, run.path, premise), kept

    @classmethod
    def _hold(cls, storage: Storage, path: Path, premise: Premise) -> RunFile:
        held = ExitStack()
        held.enter_context(storage.writing(path))
        return cls(path, premise, held)

    def write(
        self,
        outcomes: Sequence[Outcome],
        *,
        complete: bool = False,
        regressions: Sequence[Mapping[str, Any]] = (),
        unjudged: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Bring the file up to date.

        Raises:
            OSError: it cannot be written; what it held is still there.
        """
        status = COMPLETE if complete else INTERRUPTED
        session = self.premise.session(status, regressions, unjudged)
        write_json(self.path, outcomes, self.premise.environment, session)

    def close(self) -> None:
        """Let go of the file."""
        self._held.close()

    def give_up(self, error: OSError) -> str:
        """Let go of a file that could not be written; one in which no case stands is removed.

        Returns:
            What went wrong, and what is saved all the same.
        """
        what = f"{error.filename or self.path}: {error.strerror}"
        try:
            held = len(Run.load(self.path).outcomes)
        except ConfigurationError:  # gone, or out of reach
            self.close()
            return what
        if held:
            self.close()
            return f"{what}; the file holds {held} case{'s' if held > 1 else ''}"
        self.discard()
        return f"{what}; nothing is saved"

    def discard(self) -> None:
        """Remove the file, and let go of it."""
        self.path.unlink(missing_ok=True)
        self.close()
