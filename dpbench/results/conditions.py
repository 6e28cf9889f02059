"""The conditions of a session (software, machine, settings, batches), and how runs differ."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from dpbench.core.errors import ConfigurationError
from dpbench.core.subject import Script
from dpbench.results.kernels import POISSON
from dpbench.results.outcome import INTERRUPTED, Outcome
from dpbench.results.run import Run

_NOT_SETTINGS = {"directory", "path", "timeout", "active"}
"""The fields of instruments that have no influence on the measured numbers."""

UNCOMMITTED = "uncommitted changes"
"""Name of the condition whose values are digests, which tell a reader nothing, or `NONE`."""

NONE = "none"

SAME_SIZE_FLOPS = 0.01
"""Largest relative difference in arithmetic between steps whose batches have the same size."""

NEAR = 0.1
"""If the mean numbers of examples of two scripts' steps differ by at most this share, their means
are divided. The ratio is then wrong by at most about this share, because the cost of a step is a
constant plus a part for each example."""


def new_run(
    environment: Mapping[str, Any],
    grid: Mapping[str, Any],
    instruments: Sequence[object] = (),
    workers: int = 0,
    shard: str | None = None,
) -> Run:
    """Return a run without cases, for a session that has just begun.

    ``shard`` names the part of the grid that the session measures, or is None for the whole grid.
    Values that JSON cannot express are converted to text, as in a saved run.
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
    """Return the default name of a run: the commit, and the UTC time at which the run started.

    If the code differs from the commit, ``-dirty`` follows the commit. If the commit is unknown,
    the name is the time alone.
    """
    time = f"{datetime.fromisoformat(run.session['started']).astimezone(UTC):%Y%m%dT%H%M%SZ}"
    if (code := run.environment.get("code")) is None:
        return time
    return f"{code['commit'][:7]}{'-dirty' if code['dirty'] else ''}_{time}"


def merge_interrupted(run: Run, session: Run) -> Run:
    """Merge a new session with the interrupted run that it resumes.

    Raises:
        ConfigurationError: the conditions of run and session differ, or the run is already
            complete.
    """
    if run.status != INTERRUPTED:
        raise ConfigurationError(
            f"{run.path} cannot be resumed, because another session has completed it"
        )
    if differences := differing_conditions(run, session, resumed=True):
        raise ConfigurationError(
            f"{run.path} cannot be resumed, because this session differs: {'; '.join(differences)}"
        )
    return Run.merge([run, session])


def differing_conditions(before: Run, after: Run, *, resumed: bool = False) -> list[str]:
    """List differences in versions, CPU, GPU, code, settings and the definitions of metrics.

    Each difference is one phrase. Two kinds of differences are listed only if a run is
    ``resumed``: a different grid, and a condition that only one of the runs records, such as a
    setting of an instrument.
    """
    old, new = (_conditions_of_all_parts(run) for run in (before, after))
    every = {name: (old.get(name), new.get(name)) for name in [*old, *new]}
    was, now = ({metric.name: metric.how for metric in run.metrics} for run in (before, after))
    redefined = [
        f"the definition of {name}" for name in was if was[name] != now.get(name, was[name])
    ]
    return redefined + [
        _whose((before.name, was), (after.name, now))
        if name == UNCOMMITTED
        else f"{name} {was} -> {now}"
        for name, (was, now) in every.items()
        if was != now and (resumed or not (None in (was, now) or name.startswith("grid's ")))
    ]


def _whose(*changes: tuple[str, Any]) -> str:
    """Return a phrase on uncommitted changes that differ, from pairs of a run and their digest."""
    names = [name for name, digest in changes if digest not in (None, NONE)]
    if not names:
        return f"{UNCOMMITTED} are not known"
    return f"{'different ' * (len(names) > 1)}{UNCOMMITTED} in the code of {' and '.join(names)}"


def _conditions_of_all_parts(run: Run) -> dict[str, Any]:
    """Return the conditions of a run by name.

    If the parts of a merged run have different values of a condition, the values are joined.
    """
    parts = [
        _conditions(part.get("environment", {}), {**run.session, **part}) for part in run.parts
    ]
    every: dict[str, list[Any]] = {}
    for name, value in (item for part in parts for item in part.items()):
        values = every.setdefault(name, [])
        values += [value] if value not in values else []
    return {name: v[0] if len(v) == 1 else " and ".join(map(str, v)) for name, v in every.items()}


def _conditions(environment: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of one part of a run by name. Unknown conditions are None."""
    gpu = environment.get("gpu") or {}
    code = environment.get("code") or {}
    changes = code.get("changes") or (NONE if code.get("dirty") is False else None)
    named = {
        "Python": environment.get("python"),
        **environment.get("versions", {}),
        "CPU": (environment.get("machine") or {}).get("cpu"),
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver"),
        "commit": code.get("commit"),
        UNCOMMITTED: changes,
    }
    named |= {f"grid's {axis}": values for axis, values in session.get("grid", {}).items()}
    for instrument, settings in session.get("settings", {}).items():
        named |= {f"{instrument}'s {key}": value for key, value in settings.items()}
    return named


def _settings(instrument: Any) -> dict[str, Any]:
    """Return the options of an instrument that can change numbers, with names of metrics."""
    # An instrument without options need not be a dataclass.
    options = fields(instrument) if is_dataclass(instrument) else ()
    chosen: dict[str, Any] = {f.name: getattr(instrument, f.name) for f in options}
    if "metrics" in chosen:
        chosen["metrics"] = [metric.name for metric in chosen["metrics"]]
    if "instrument" in chosen:  # an instrument for scripts wraps another instrument
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
    """Return the software and machine of a run. No package is imported to read its version.

    Args:
        gpu: the name, driver and other properties of the GPU that measured, or None.
        tools: the versions of the programs that instruments use, by name.
        project: a directory of the measured project, whose commit is recorded.
    """
    versions: dict[str, str | None] = dict.fromkeys(
        ("dpbench", "torch", "opacus", "transformers", "pandas", "ncu-report")
    )
    for package in versions:
        with suppress(metadata.PackageNotFoundError):
            # The package named `dpbench` on PyPI is another project.
            versions[package] = metadata.version(package.replace("dpbench", "pytest-dpbench"))
    cpu = None  # recorded, because some steps wait for the CPU, whose speed sets their time
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
    """Return the commit of the project in a directory, and a digest of uncommitted changes.

    Changed tracked files count as changes. Untracked Python and TOML files, such as a trainer or a
    grid, also count, unless git ignores them. Other untracked files, such as results, do not count.

    Returns:
        ``commit``; ``dirty``, which is true if there are changes; and ``changes``, the SHA-256
        digest of the changes, or None without changes. Returns None if git is not installed or the
        directory has no commit.
    """
    commit = git(project, "rev-parse", "HEAD")
    top = git(project, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    root = Path(os.fsdecode(top).rstrip("\n"))
    # These options disable the user's diff tool, which may ignore some changes.
    own = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")
    difference = git(root, "diff", *own, "--binary", "HEAD") or b""
    # git's own comparison of submodules would use the diff tool of each submodule.
    for line in (git(root, "ls-files", "-z", "--stage") or b"").split(b"\0"):
        inside = root / os.fsdecode(line.partition(b"\t")[2])
        if line.startswith(b"160000 ") and (inside / ".git").exists():
            difference += str((code_state(inside) or {}).get("changes") or "").encode()
    digest = hashlib.sha256(difference)
    untracked = git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.toml")
    names = []
    for name in sorted(filter(None, (untracked or b"").split(b"\0"))):
        with suppress(OSError):  # for example, an editor's lock file is a dangling link
            content = (root / os.fsdecode(name)).read_bytes()
            digest.update(name + content)
            names.append(name)
    dirty = bool(difference or names)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest() if dirty else None,
    }


PRIVATE = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "log.showSignature": "false",
}
"""Values of git's settings with which git runs no program that a repository's ``config`` names."""


def git(directory: Path, *arguments: str, fetches: bool = False) -> bytes | None:
    """Run git in a directory and return its output, or None if git failed or is not installed.

    git runs no hook, monitor or gpg (see `PRIVATE`). Unless ``fetches`` is True, git also fetches
    nothing that a partial clone lacks.
    """
    settings = [word for name, value in PRIVATE.items() for word in ("-c", f"{name}={value}")]
    offline = {} if fetches else {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *settings, *arguments],
            capture_output=True,
            check=True,
            env=os.environ | offline,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


SAME_BATCHES = (
    "draw the same batches, by seed= of make_private (a seeded run is for measuring, not private) "
    "or generator= of the data loader that Opacus gets"
)


def no_ratios(standards: Iterable[Outcome], outcomes: Iterable[Outcome]) -> list[str]:
    """Return why mean steps of scripts cannot be divided by those of the baseline, if any."""
    found = [_judged(*pair) for pair in _pairs(standards, outcomes)]
    return [*dict.fromkeys(f"no ratio to the baseline: {why}" for near, why in found if not near)]


def ratio_notes(outcomes: Sequence[Outcome], baseline: str) -> Iterator[str]:
    """Yield a note for each script that has ratios, but batches of other sizes than the baseline.

    Args:
        outcomes: the outcomes of a run.
        baseline: the name of the baseline's script.
    """
    standards = [o for o in outcomes if o.case.trainer == baseline]
    for pair in _pairs(standards, [o for o in outcomes if o not in standards]):
        near, note = _judged(*pair)
        if near and note:
            yield f"{pair[1].case.id}: {note}"


def other_sizes(before: Iterable[Outcome], after: Iterable[Outcome]) -> Iterator[str]:
    """Yield a note for each script whose batches differ in size, and differ between two runs."""
    for old, new in _pairs(before, after):
        more = max(map(_excess, (old, new)))
        if old.case == new.case and more > SAME_SIZE_FLOPS and _sizes(old) != _sizes(new):
            what = "examples" if new.examples else "arithmetic in forward"
            steps = "" if POISSON in new.notes else ", or record more --steps"
            yield (
                f"{new.case.id}: the runs had batches of other sizes: one step has up to "
                f"{more:.0%} more {what} than another, and numbers are means over the steps; "
                f"{SAME_BATCHES}{steps}"
            )


def other_batches(before: Outcome, after: Outcome) -> str:
    """Return why numbers of two runs are of different batches, or "" if that is not known."""
    sampled = any(POISSON in each.notes for each in (before, after))
    sizes = [_sizes(each) for each in (before, after)]
    if not sampled or sizes[0] == sizes[1] or not all(sizes):
        return ""
    means = sorted(map(fmean, sizes))
    if means[1] <= (1 + SAME_SIZE_FLOPS) * means[0]:
        return ""
    return f"{POISSON}, and the runs had batches of other sizes: {SAME_BATCHES}"


def _pairs(
    first: Iterable[Outcome], second: Iterable[Outcome]
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield the pairs of scripts' outcomes that the same instrument measured."""
    for pair in product(first, second):
        if pair[0].by & pair[1].by and all(isinstance(each.case, Script) for each in pair):
            yield pair


def _judged(standard: Outcome, outcome: Outcome) -> tuple[bool, str]:
    """Return whether mean steps of a script and its baseline can be divided, and a note."""
    both = (outcome, standard)
    sampled = [POISSON in each.notes or len({*each.examples}) > 1 for each in both]
    if any(sampled) and _sizes(standard) == _sizes(outcome) != ():
        return True, ""
    if any(sampled) and all(any(each.examples) for each in both):
        means = [fmean(each.examples) for each in both]
        differ = "batches differ in size"
        of = f"{means[0]:.1f} and {means[1]:.1f} examples"
        if max(means) <= (1 + NEAR) * min(means):
            most = f"{max(outcome.examples)} and {max(standard.examples)}"
            return True, (
                f"{differ}: the ratios compare mean steps, of {of}; those of times compare "
                f"medians, and those of peaks the largest steps, of {most} examples"
            )
        return False, (
            f"{differ}, and mean steps have {of}, which is more than {NEAR:.0%} apart: record more "
            f"--steps, or {SAME_BATCHES}"
        )
    varies = [yes or _excess(o) > SAME_SIZE_FLOPS for yes, o in zip(sampled, both, strict=True)]
    if varies[0] == varies[1]:
        unknown = "batches of both differ in size, and how their mean steps compare is unknown"
        return True, unknown * (varies[0] and _sizes(standard) != _sizes(outcome))
    which = "the script's" if varies[0] else "the baseline's"
    return False, (
        f"only {which} batches differ in size, as Poisson batches do, and how many examples each "
        f"step has is unknown; compare scripts that sample in the same way"
    )


def _sizes(outcome: Outcome) -> tuple[float, ...]:
    """Return the number of examples of each step if it is known, otherwise forward's arithmetic."""
    flops = (r.value for r in outcome.rows if (r.metric, r.phase) == ("flops", "forward"))
    return outcome.examples or tuple(flops)


def _excess(outcome: Outcome) -> float:
    """Return by how much the largest step exceeds the smallest in examples or arithmetic."""
    sizes = _sizes(outcome)
    return max(sizes) / (min(sizes) or math.nan) - 1 if sizes else 0.0
