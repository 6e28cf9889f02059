"""Reading kernel-replay reports, one action a kernel launch; needs neither a GPU nor ncu.

NVIDIA's library takes 0.4 ms a kernel and never gives back the 0.35 MB that it then holds. So
large reports are read in parts, by processes that end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dpbench.case import ALL_PHASES, OUTSIDE
from dpbench.errors import ConfigurationError
from dpbench.instruments.child import log_lines
from dpbench.instruments.ncu.range_report import (
    DEVICE,
    MetricMissing,
    NothingProfiled,
    ReportUnreadable,
    WrongReplay,
    count_actions,
    is_kernel,
    label,
    load_actions,
)
from dpbench.metrics import METRICS, Metric
from dpbench.results.kernels import KernelLaunch

METRIC_OF = {
    "read_bytes": "dram_read_bytes",
    "write_bytes": "dram_write_bytes",
    "l2_bytes": "l2_total_bytes",
}
"""The metric of ranges whose counters are behind each number of a `KernelLaunch`."""

TIME = "gpu__time_duration.sum"
"""How long an action took, ns."""

GRID = tuple(f"launch__grid_dim_{axis}" for axis in "xyz")

PROFILING = '==PROF== Profiling "'
"""What ncu prints at each kernel, before its name and how far it has come."""

PART = 700
"""How many kernels are worth a process of their own, which takes 0.2 s to start."""


def kernel_counters(chip: str = "") -> tuple[str, ...]:
    """What is counted of each kernel on a chip.

    Together they take one pass of each kernel on GH100: nothing is run again, nothing saved and
    restored.
    """
    counted = {metric: METRICS[metric].on(chip) for metric in METRIC_OF.values()}
    if lacking := [metric for metric, names in counted.items() if not names]:
        raise ConfigurationError(
            f"{chip} has no counters for {', '.join(lacking)} of kernels; measure without --kernels"
        )
    return (*chain.from_iterable(counted.values()), TIME)


@dataclass(frozen=True)
class KernelReport:
    """The name of a GPU, and what it launched in the order of the run."""

    device: str
    launches: tuple[KernelLaunch, ...]


def read_kernels(path: Path) -> KernelReport:
    """A report of kernels, one launch after the other.

    A kernel outside every phase, in a report of whatever program, counts as `OUTSIDE`.
    """
    total = check_complete(path)
    if total <= PART:
        plain = plain_actions(load_actions(path))
    else:
        parts = min(-(-total // PART), os.cpu_count() or 1)
        with ThreadPoolExecutor(parts) as pool:
            read = pool.map(lambda part: _read_part(path, part, parts), range(parts))
            plain = list(chain.from_iterable(read))
    return KernelReport(str(plain[0]["device"]), tuple(_launches(plain, path)))


def check_complete(path: Path) -> int:
    """How many kernels a report holds: as many as ncu's log beside it tells of, if that is there.

    The library reads a truncated file as a report with fewer kernels, without an error.
    """
    total = count_actions(path)
    if not total:
        raise NothingProfiled(f"{path}: the report holds no kernel")
    log = path.with_suffix(".log")
    if log.exists() and (told := profiled_in(log)) != total:
        raise ReportUnreadable(
            f"{path}: the report of kernels is incomplete, it holds {total} of {told}"
        )
    return total


def profiled_in(log: Path) -> int:
    """How many kernels ncu says in its log to have profiled."""
    return sum(line.count(PROFILING) for line in log_lines(log))


def plain_actions(actions: Sequence[Any]) -> list[dict[str, Any]]:
    """What is read of each action, as plain JSON types, or which of its counters is missing."""
    counters = {field: _spelled(METRICS[name], actions[0]) for field, name in METRIC_OF.items()}
    plain = []
    for action in actions:
        names = [*chain.from_iterable(counters.values()), TIME, *GRID, DEVICE]
        metrics = {name: action.metric_by_name(name) for name in names}
        values = {name: metric.value() for name, metric in metrics.items() if metric is not None}
        found: dict[str, Any] = {"device": values.get(DEVICE), "label": label(action)}
        found["kernel"] = full_name(action) if is_kernel(action) else None
        found["missing"] = [name for name in names if name not in values]
        if not found["missing"]:
            found["grid"] = [int(values[name]) for name in GRID]
            found["seconds"] = 1e-9 * values[TIME]
            for field, summed in counters.items():
                found[field] = float(sum(values[name] for name in summed))
        plain.append(found)
    return plain


def _spelled(metric: Metric, action: Any) -> tuple[str, ...]:
    """The counters of a metric as the chip of a report has them."""
    there = (names for names in metric.spellings if all(map(action.metric_by_name, names)))
    return next(there, metric.counters)


def _launches(plain: Iterable[dict[str, Any]], path: Path) -> Iterator[KernelLaunch]:
    places: Counter[tuple[int, str]] = Counter()
    for action in plain:
        if action["kernel"] is None:
            raise WrongReplay(f"{path}: it holds ranges, not kernels; dpbench show reads it")
        if missing := action["missing"]:
            if places or action["device"] is None:  # the kernels before it have them
                raise ReportUnreadable(
                    f"{path}: the report of kernels is incomplete, it ends in a kernel"
                )
            raise MetricMissing(f"{path}: the report has no {missing[0]}")
        place = phase_of(action["label"])
        numbers = {field: action[field] for field in (*METRIC_OF, "seconds")}
        x, y, z = action["grid"]
        yield KernelLaunch(*place, places[place], action["kernel"], (x, y, z), **numbers)
        places[place] += 1


def full_name(action: Any) -> str:
    """The whole demangled name of an action's kernel."""
    return str(action.name(action.NameBase_DEMANGLED))


def phase_of(name: str | None) -> tuple[int, str]:
    """Step number and phase from a range's name ``STEP.PHASE``; any other is outside."""
    step, _, phase = (name or "").partition(".")
    if step.isdecimal() and phase in ALL_PHASES:
        return int(step), phase
    return 0, OUTSIDE


def _read_part(path: Path, part: int, parts: int) -> list[dict[str, Any]]:
    """One of several parts of a report, read by a process of its own."""
    command = [sys.executable, "-m", __name__, str(path), str(part), str(parts)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ReportUnreadable(f"{path}: not a readable report ({last})")
    plain: list[dict[str, Any]] = json.loads(done.stdout)
    return plain


if __name__ == "__main__":
    _path, _part, _parts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    json.dump(plain_actions(load_actions(_path, _part, _parts)), sys.stdout)
