"""Under which conditions a session measures, and how two sessions differ in them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dpbench.gpu import Gpu
from dpbench.grid import Grid
from dpbench.results.run import Run

_NOT_SETTINGS = {"directory", "path", "timeout"}
"""Fields of instruments that do not change what they measure."""


@dataclass(frozen=True)
class Conditions:
    """What a session measures, with what and where; all of it plain JSON types.

    ``began`` is the moment of ``started`` (ISO 8601 in UTC) on the clock that nobody sets;
    ``earlier_seconds`` is how long the session took that this one resumes, ``cases_asked`` how many
    cases are to be measured, as far as that is known.
    """

    environment: Mapping[str, Any]
    started: str
    grid: Mapping[str, Any]
    settings: Mapping[str, Any]
    workers: int = 0
    earlier_seconds: float = 0.0
    cases_asked: int = 0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def now(
        cls,
        environment: Mapping[str, Any],
        grid: Grid,
        instruments: Sequence[object] = (),
        workers: int = 0,
    ) -> Conditions:
        """Those of a session that begins now, with these instruments."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        settings = {getattr(i, "name", str(i)): _settings(i) for i in instruments}
        said = [environment, asdict(grid), settings]
        # As they come back from a file; what JSON does not know becomes text.
        environment, axes, settings = json.loads(json.dumps(said, default=str))
        return cls(environment, started, axes, settings, workers)

    @property
    def name(self) -> str:
        """A name for a run that got none: commit, whether it was changed, and the time in UTC."""
        time = f"{datetime.fromisoformat(self.started).astimezone(UTC):%Y%m%dT%H%M%SZ}"
        if (code := self.environment.get("code")) is None:
            return time
        return f"{code['commit'][:7]}{'-dirty' if code['dirty'] else ''}_{time}"

    def session(
        self,
        status: str,
        regressions: Sequence[Mapping[str, Any]] = (),
        unjudged: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The ``session`` part of a document that is written now."""
        seconds = max(0.0, time.monotonic() - self.began) + self.earlier_seconds
        said = ("started", "workers", "cases_asked", "grid", "settings")
        return {
            **{name: copy(getattr(self, name)) for name in said},  # a hook may change them
            "seconds": round(seconds, 1),
            "status": status,
            "regressed": bool(regressions or unjudged),
            "regressions": list(regressions),
            "unjudged": list(unjudged),
        }

    def differences(self, run: Run) -> list[str]:
        """What is not as it was in a run, one phrase each: versions, GPU, code, grid."""
        old = _named(run.environment, run.session)
        new = _named(self.environment, {"grid": self.grid, "settings": self.settings})
        return _differences(old, new)


def premise_differences(before: Run, after: Run) -> list[str]:
    """What is not the same for two runs, one phrase each: versions, GPU, code, settings.

    What one of the two does not say is no difference, nor is an instrument that one lacks; the
    cases of a grid are named anyway.
    """
    old, new = (_named(run.environment, run.session) for run in (before, after))
    both = [n for n in old if n[:7] != "grid's " and None not in (old[n], new.get(n))]
    return _differences({name: old[name] for name in both}, {name: new[name] for name in both})


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    every = {name: (old.get(name), new.get(name)) for name in [*old, *new]}
    return [f"{name} {was} -> {now}" for name, (was, now) in every.items() if was != now]


def _named(environment: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for numbers of two sessions to stand in one run, by name."""
    gpu = environment.get("gpu") or {}
    code = environment.get("code") or {}
    changes = code.get("changes") or ("none" if code.get("dirty") is False else None)
    found = {
        "Python": environment.get("python"),
        **environment.get("versions", {}),
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver"),
        "commit": code.get("commit"),
        "uncommitted changes": changes and changes[:12],
    }
    found |= {f"grid's {axis}": values for axis, values in session.get("grid", {}).items()}
    for instrument, settings in session.get("settings", {}).items():
        found |= {f"{instrument}'s {key}": value for key, value in settings.items()}
    return found


def _settings(instrument: Any) -> dict[str, Any]:
    """The options of an instrument, metrics by their names."""
    options = fields(instrument) if is_dataclass(instrument) else ()  # one without any may be none
    found: dict[str, Any] = {f.name: getattr(instrument, f.name) for f in options}
    if "metrics" in found:
        found["metrics"] = [metric.name for metric in found["metrics"]]
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in found.items()
        if name not in _NOT_SETTINGS
    }


# --- software and machine --------------------------------------------------------------------


def environment(
    gpu: Gpu | None = None,
    *,
    tools: Mapping[str, str] | None = None,
    project: Path | None = None,
) -> dict[str, Any]:
    """Which software and machine made a run; versions are read without importing anything.

    Args:
        gpu: what measured, if a GPU did; it knows its driver.
        tools: the versions of what instruments used beside Python's packages.
        project: a directory of the measured project, whose commit is to be recorded.
    """
    versions: dict[str, str | None] = dict.fromkeys(
        ("dpbench", "torch", "opacus", "pandas", "ncu-report")
    )
    for package in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cpu = None  # launch-bound steps take as long as it needs for them
    with suppress(OSError):
        cpu = re.search(r"^model name\s*:\s*(.*?)\s*$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": {
            "architecture": platform.machine(),
            "cpu": cpu[1] if cpu else None,
            "cpus": os.cpu_count(),
        },
        "versions": {**versions, "ncu": None, **(tools or {})},
        # Not what it was doing at that moment.
        "gpu": {f.name: getattr(gpu, f.name) for f in fields(gpu) if f.compare} if gpu else None,
        "code": code_state(project) if project else None,
    }


def code_state(project: Path) -> dict[str, Any] | None:
    """The commit of the project in a directory, and whether the code differs from it.

    ``changes`` is a digest of what differs: two dirty states with the same digest are the same
    code. Changed tracked files count, and untracked Python and TOML files (an own trainer, a
    grid); results and reports that lie around do not. None where git or a commit is absent.
    """
    commit = _git(project, "rev-parse", "HEAD")
    top = _git(project, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    root = Path(os.fsdecode(top).rstrip("\n"))
    # Git's own difference: a tool that a user has set up may leave out what it takes for equal.
    own = ("--no-ext-diff", "--no-textconv", "--no-color")
    digest = hashlib.sha256(difference := _git(root, "diff", *own, "--binary", "HEAD") or b"")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.toml")
    names = []
    for name in sorted(filter(None, (untracked or b"").split(b"\0"))):
        with suppress(OSError):  # the link by which an editor locks a file leads nowhere
            content = (root / os.fsdecode(name)).read_bytes()
            digest.update(name + content)
            names.append(name)
    dirty = bool(difference or names)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest() if dirty else None,
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    """What git prints, or None if it cannot."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
