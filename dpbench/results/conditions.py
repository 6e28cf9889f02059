"""Records the conditions of a session, and compares those of two sessions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dpbench.core.errors import ConfigurationError
from dpbench.results.outcome import INTERRUPTED
from dpbench.results.run import Run

_NOT_SETTINGS = {"directory", "path", "timeout", "active"}
"""Fields of instruments that do not change what they measure."""


def new_run(
    environment: Mapping[str, Any],
    grid: Mapping[str, Any],
    instruments: Sequence[object] = (),
    workers: int = 0,
    shard: str | None = None,
) -> Run:
    """A new session with these instruments, as a run without cases.

    Grid, settings and environment have the form that a file gives them: values that JSON lacks are
    text. The grid names the ``shard``, if only one is measured.
    """
    session = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "workers": workers,
        "cases_asked": 0,
        "grid": {**grid, **({"shard": shard} if shard else {})},
        "settings": {getattr(i, "name", str(i)): _settings(i) for i in instruments},
        "seconds": 0.0,
    }
    environment, session = json.loads(json.dumps([environment, session], default=str))
    return Run.of("this session", (), environment, session)


def automatic_name(run: Run) -> str:
    """The default name of a run: commit, whether it was changed, and the time in UTC."""
    time = f"{datetime.fromisoformat(run.session['started']).astimezone(UTC):%Y%m%dT%H%M%SZ}"
    if (code := run.environment.get("code")) is None:
        return time
    return f"{code['commit'][:7]}{'-dirty' if code['dirty'] else ''}_{time}"


def merge_interrupted(run: Run, begun: Run) -> Run:
    """A new session, merged with the interrupted run that it resumes.

    Refused if versions, code, grid or settings differ.
    """
    if run.status != INTERRUPTED:
        raise ConfigurationError(f"{run.path} has been completed by another session")
    if differences := differing_conditions(run, begun, resumed=True):
        raise ConfigurationError(
            f"{run.path} cannot be resumed, for this session differs: {'; '.join(differences)}"
        )
    return Run.merge([run, begun])


def differing_conditions(before: Run, after: Run, *, resumed: bool = False) -> list[str]:
    """List differences in versions, GPU, code, settings and metric definitions, one phrase each.

    A condition that only one run records (e.g. an instrument) does not count as a difference, nor
    does the grid, whose cases are compared one by one. If a run is ``resumed``, both count.
    """
    old, new = (_named_of_all(run) for run in (before, after))
    every = {name: (old.get(name), new.get(name)) for name in [*old, *new]}
    was, now = ({metric.name: metric.how for metric in run.metrics} for run in (before, after))
    redefined = [
        f"the definition of {name}" for name in was if was[name] != now.get(name, was[name])
    ]
    return redefined + [
        f"{name} {was} -> {now}"
        for name, (was, now) in every.items()
        if was != now and (resumed or not (None in (was, now) or name.startswith("grid's ")))
    ]


def _named_of_all(run: Run) -> dict[str, Any]:
    """`_named` of a run; where parts of the run differ, the values of all parts."""
    parts = [_named(part.get("environment", {}), {**run.session, **part}) for part in run.parts]
    every: dict[str, list[Any]] = {}
    for name, value in (item for part in parts for item in part.items()):
        values = every.setdefault(name, [])
        values += [value] if value not in values else []
    return {name: v[0] if len(v) == 1 else " and ".join(map(str, v)) for name, v in every.items()}


def _named(environment: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions, by name, that must agree for two sessions to be parts of one run."""
    gpu = environment.get("gpu") or {}
    code = environment.get("code") or {}
    changes = code.get("changes") or ("none" if code.get("dirty") is False else None)
    named = {
        "Python": environment.get("python"),
        **environment.get("versions", {}),
        "CPU": (environment.get("machine") or {}).get("cpu"),
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver"),
        "commit": code.get("commit"),
        "uncommitted changes": changes and str(changes)[:12],
    }
    named |= {f"grid's {axis}": values for axis, values in session.get("grid", {}).items()}
    for instrument, settings in session.get("settings", {}).items():
        named |= {f"{instrument}'s {key}": value for key, value in settings.items()}
    return named


def _settings(instrument: Any) -> dict[str, Any]:
    """The options of an instrument, with metrics as names."""
    options = fields(instrument) if is_dataclass(instrument) else ()  # one without any may be none
    chosen: dict[str, Any] = {f.name: getattr(instrument, f.name) for f in options}
    if "metrics" in chosen:
        chosen["metrics"] = [metric.name for metric in chosen["metrics"]]
    if "instrument" in chosen:  # a script's instrument wraps another
        chosen = _settings(chosen.pop("instrument")) | chosen
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in chosen.items()
        if name not in _NOT_SETTINGS
    }


# --- software and machine --------------------------------------------------------------------


def environment(
    gpu: Mapping[str, Any] | None = None,
    *,
    tools: Mapping[str, str] | None = None,
    project: Path | None = None,
) -> dict[str, Any]:
    """The software and machine of a run; versions are read without importing the packages.

    Args:
        gpu: what identifies the GPU that measured, if one did.
        tools: the versions of programs that instruments use.
        project: a directory of the measured project, whose commit is recorded.
    """
    versions: dict[str, str | None] = dict.fromkeys(
        ("dpbench", "torch", "opacus", "transformers", "pandas", "ncu-report")
    )
    for package in versions:
        with suppress(metadata.PackageNotFoundError):
            # PyPI's `dpbench` is another project.
            versions[package] = metadata.version(package.replace("dpbench", "pytest-dpbench"))
    cpu = None  # its speed determines the time of launch-bound steps
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
        "gpu": gpu,
        "code": code_state(project) if project else None,
    }


def code_state(project: Path) -> dict[str, Any] | None:
    """The commit of the project in a directory, and whether the code differs from it.

    ``changes`` is a digest of what differs: two dirty states with the same digest are the same
    code. Changed tracked files count, and untracked Python and TOML files (an own trainer, a
    grid); results and reports do not. None where git or a commit is absent.
    """
    commit = git(project, "rev-parse", "HEAD")
    top = git(project, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    root = Path(os.fsdecode(top).rstrip("\n"))
    # Git's own diff: a user's diff tool may ignore some changes.
    own = ("--no-ext-diff", "--no-textconv", "--no-color", "--submodule=diff")
    difference = git(root, "diff", *own, "--binary", "HEAD") or b""
    digest = hashlib.sha256(difference)
    untracked = git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.toml")
    names = []
    for name in sorted(filter(None, (untracked or b"").split(b"\0"))):
        with suppress(OSError):  # an editor's lock file is a dangling link
            content = (root / os.fsdecode(name)).read_bytes()
            digest.update(name + content)
            names.append(name)
    dirty = bool(difference or names)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest() if dirty else None,
    }


def git(directory: Path, *arguments: str) -> bytes | None:
    """The output of git in a directory; None if it failed or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
