"""Reads busy time and launches of a GPU by phase from an SQLite file that nsys has exported.

Reading a file needs neither a GPU nor Nsight Systems. Times are integer nanoseconds of one clock.

NVIDIA's "SQLite Export Schema Reference" describes the tables
(https://docs.nvidia.com/nsight-systems/nsys-exporter/exported_data.html). A file does not contain
empty tables. Files of older versions of nsys lack some columns. The name of a table can end in a
version, such as ``NVTX_EVENTS_V2``.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpbench.child.messages import NVTX_DOMAIN
from dpbench.core.errors import InstrumentError
from dpbench.results.rows import STEP

START_END_RANGE = 60
"""Value of the column ``eventType`` for start/end ranges (``NvtxStartEndRange``)."""

DEVICE_TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
"""Names of the tables of GPU activities, without the prefix ``CUPTI_ACTIVITY_KIND_``."""

PROCESS = 1 << 24
"""Divides ``globalPid`` and ``globalTid``, whose low bits do not identify the process."""

_VERSION = re.compile(r"_V\d+$")  # at the end of a table's name
_RANGE = re.compile(rf"{NVTX_DOMAIN}:(?P<step>\d+)\.(?P<phase>.*)")


class TimelineUnreadable(InstrumentError):
    """The file is missing, truncated, or not an export of Nsight Systems."""

    remedy = "export it again: nsys export --type sqlite FILE.nsys-rep"


class NothingTraced(InstrumentError):
    """Nsight Systems recorded no work of the GPU, or no marked step."""

    remedy = (
        "run the work of a step inside `trainer.train_step`, use a version of nsys that supports "
        "the GPU's driver, and end other profilers that use CUPTI"
    )


class Range(NamedTuple):
    """A marked range on the CPU: a phase of a step, or a whole step with the phase `STEP`."""

    step: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The timeline of the GPU with the most activities.

    In a step with a `STEP` range the CPU can run ahead, so the ranges of phases do not show when
    the GPU did the work. In other steps the GPU finishes each phase before the next phase begins.
    Busy times by phase come only from steps without a `STEP` range.

    Attributes:
        device: name of the GPU.
        tool: name and version of the program that wrote the file.
        ranges: the marked ranges, sorted by start.
        activities: the kernels, copies, memsets and CUDA graphs of the GPU, sorted by start, with
            the columns ``start``, ``end`` and ``launched``, the time at which the CPU launched the
            activity. If nsys did not record the launch, ``launched`` equals ``start``.
    """

    device: str
    tool: str
    ranges: Sequence[Range]
    activities: pd.DataFrame

    @cached_property
    def busy(self) -> NDArray[np.int64]:
        """Array ``[n, 2]`` of the starts and ends of the ``n`` spans in which the GPU was busy."""
        starts = self.activities.start.to_numpy()
        ends = np.maximum.accumulate(self.activities.end.to_numpy())
        idle_before = np.append(True, starts[1:] > ends[:-1])
        return np.column_stack([starts[idle_before], ends[np.append(idle_before[1:], True)]])

    @property
    def whole_steps(self) -> list[Range]:
        """The `STEP` ranges.

        If the file contains no marked ranges, this list has one range, which covers all activities.
        """
        if self.ranges:
            return [each for each in self.ranges if each.phase == STEP]
        return [Range(0, STEP, int(self.busy[0, 0]), int(self.busy[-1, 1]))]

    def usages(self) -> list[dict[str, Any]]:
        """Return metrics of each whole step, and of each phase of steps without a `STEP` range."""
        whole = self.whole_steps
        marked = {each.step for each in whole}
        launched = np.sort(self.activities.launched)
        sums: dict[tuple[int, str], NDArray[np.int64]] = defaultdict(lambda: np.zeros(3, int))
        for each in (*(r for r in self.ranges if r.step not in marked), *whole):
            where = each.start, each.end
            busy = np.diff(self.busy.clip(*where)).sum()
            launches = np.diff(np.searchsorted(launched, where)).sum()
            sums[each.step, each.phase] += (each.end - each.start, busy, launches)
        return [
            {
                "step": step,
                "phase": phase,
                "timeline_seconds": duration / 1e9,
                "timeline_busy_seconds": busy / 1e9,
                "timeline_launches": launches,
            }
            for (step, phase), (duration, busy, launches) in sums.items()
        ]


def read_timeline(path: Path, named: Path | None = None) -> Timeline:
    """Read the timeline of an SQLite file.

    Args:
        path: path of the SQLite file.
        named: path to name in errors, if ``path`` is a temporary file.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _timeline(database, named or path)
    except (sqlite3.Error, pd.errors.DatabaseError) as error:
        raise TimelineUnreadable(
            f"{path} is not an SQLite file that Nsight Systems exported ({error})"
        ) from error


def _timeline(database: sqlite3.Connection, path: Path) -> Timeline:
    read = partial(_table, database)
    database.execute("SELECT id FROM StringIds")  # exists in each file that nsys exported
    columns = ("start", "end", "deviceId", "globalPid", "correlationId")
    tables = [read(f"CUPTI_ACTIVITY_KIND_{table}", *columns) for table in DEVICE_TABLES]
    work = pd.concat(tables, ignore_index=True).fillna(0).astype("int64")
    if work.empty:
        said = "; ".join(read("DIAGNOSTIC_EVENT", "text").text)
        raise NothingTraced(
            f"{path} contains no kernel, copy or memset (nsys reports: {said or 'nothing'})"
        )
    work = work[work.deviceId == work.deviceId.mode()[0]]
    calls = read("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
    calls = calls.fillna(0).astype("int64").rename(columns={"start": "launched"})
    # A call and the activity that it launched have the same process and correlation number.
    calls["process"], work["process"] = calls.globalTid // PROCESS, work.globalPid // PROCESS
    key = ["process", "correlationId"]
    calls = calls[calls.correlationId != 0].drop_duplicates(key, keep="last").set_index(key)
    work = work.join(calls.launched.astype("Int64"), on=key)
    work["launched"] = work.launched.fillna(work.start).astype("int64")
    names = {*read("TARGET_INFO_GPU", "name").name}
    return Timeline(
        names.pop() if len(names) == 1 else "a GPU",
        f"nsys {_version(read)}",
        sorted(_ranges(read), key=lambda each: (each.start, -each.end)),
        work[["start", "end", "launched"]].sort_values(["start", "end"], ignore_index=True),
    )


def _table(database: sqlite3.Connection, name: str, *columns: str) -> pd.DataFrame:
    """Return columns of the newest version of a table. What the file lacks is missing or empty."""
    there = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
    versions = [each for (each,) in database.execute(there) if _VERSION.sub("", each) == name]
    if not versions:
        return pd.DataFrame(columns=[*columns])
    newest = max(versions, key=lambda each: int(each.rpartition("_V")[2]) if each != name else 1)
    # Times need all bits of an integer, also in columns with missing values.
    rows = pd.read_sql_query(f'SELECT * FROM "{newest}"', database, dtype_backend="numpy_nullable")
    return rows.reindex(columns=[*columns])


def _ranges(read: Callable[..., pd.DataFrame]) -> Iterator[Range]:
    strings = read("StringIds", "id", "value").set_index("id").value
    events = read("NVTX_EVENTS", "start", "end", "eventType", "text", "textId")
    events = events[(events.eventType == START_END_RANGE) & events.end.notna()]
    names = events.text.astype(object).fillna(events.textId.map(strings))
    for start, end, name in zip(events.start, events.end, names, strict=True):
        if found := _RANGE.fullmatch(str(name)):
            yield Range(int(found["step"]), found["phase"], int(start), int(end))


def _version(read: Callable[..., pd.DataFrame]) -> str:
    tables = [read(name, "name", "value") for name in ("META_DATA_EXPORT", "EXPORT_META_DATA")]
    said = pd.concat(tables).set_index("name").value
    return str(said.get("EXPORT_PRODUCT_VERSION", "unknown"))
