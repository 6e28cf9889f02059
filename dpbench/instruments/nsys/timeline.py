"""Reads busy time and launches of a GPU by phase from an SQLite file that nsys has exported.

Reading a file needs neither a GPU nor Nsight Systems. Times are integer nanoseconds of one clock.

NVIDIA's "SQLite Export Schema Reference" describes the tables
(https://docs.nvidia.com/nsight-systems/nsys-exporter/exported_data.html). A file does not contain
empty tables. Files of older versions of nsys lack some columns. The name of a table can end in a
version, such as ``NVTX_EVENTS_V2``.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbench.child.messages import NVTX_DOMAIN
from dpbench.core.errors import InstrumentError
from dpbench.results.rows import STEP

START_END_RANGE = 60
"""Value of the column ``eventType`` for start/end ranges (``NvtxStartEndRange``)."""

DEVICE_TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
"""Names of the tables of GPU activities, without the prefix ``CUPTI_ACTIVITY_KIND_``."""

PID_BITS = 24
"""Number of low bits in ``globalPid`` and ``globalTid`` that do not identify the process."""


class TimelineUnreadable(InstrumentError):
    """The file is missing, truncated, or not an export of Nsight Systems."""

    remedy = "export it again: nsys export --type sqlite FILE.nsys-rep"


class NothingTraced(InstrumentError):
    """Nsight Systems recorded no work of the GPU, or no marked step."""

    remedy = (
        "run the work of a step inside `trainer.train_step`, use a version of nsys that supports "
        "the GPU's driver, and end other profilers that use CUPTI"
    )


class Activity(NamedTuple):
    """A kernel, copy, memset or CUDA graph on the GPU.

    ``launched`` is the time at which the CPU launched the activity. If nsys did not record the
    launch, ``launched`` equals ``start``.
    """

    start: int
    end: int
    launched: int


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
        activities: the activities of the GPU, sorted by start.
    """

    device: str
    tool: str
    ranges: Sequence[Range]
    activities: Sequence[Activity]

    @cached_property
    def busy(self) -> NDArray[np.int64]:
        """Array ``[n, 2]`` of the starts and ends of the ``n`` spans in which the GPU was busy."""
        starts, ends = np.array([(each.start, each.end) for each in self.activities]).T
        ends = np.maximum.accumulate(ends)
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
        launched = np.sort([each.launched for each in self.activities])
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
            return _Export(database).timeline(named or path)
    except sqlite3.Error as error:
        raise TimelineUnreadable(
            f"{path} is not an SQLite file that Nsight Systems exported ({error})"
        ) from error


class _Export:
    """An open SQLite file that nsys exported. The table ``StringIds`` exists in each such file."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        names = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._newest: dict[str, tuple[int, str]] = {}
        """The largest version of each table, and the table's name with this version."""
        for (name,) in names:
            plain, _, version = name.rpartition("_V")
            known = (plain, int(version)) if plain and version.isdecimal() else (name, 1)
            self._newest[known[0]] = max(self._newest.get(known[0], (0, "")), (known[1], name))
        if not self._columns("StringIds"):
            raise sqlite3.DatabaseError("the table StringIds is missing")
        self.strings: dict[int, str] = dict(self.select("StringIds", "id", "value"))

    def timeline(self, path: Path) -> Timeline:
        by_device: dict[int, list[Activity]] = defaultdict(list)
        for device, activity in self._activities():
            by_device[device].append(activity)
        if not by_device:
            said = "; ".join(text for (text,) in self.select("DIAGNOSTIC_EVENT", "text"))
            raise NothingTraced(
                f"{path} contains no kernel, copy or memset (nsys reports: {said or 'nothing'})"
            )
        busiest: list[Activity] = max(by_device.values(), key=len)
        names = {str(name) for (name,) in self.select("TARGET_INFO_GPU", "name")}
        return Timeline(
            names.pop() if len(names) == 1 else "a GPU",
            f"nsys {self._version()}",
            sorted(self._ranges(), key=lambda each: (each.start, -each.end)),
            sorted(busiest),
        )

    def _columns(self, table: str) -> set[str]:
        """Return the names of a table's columns, or an empty set if the table is missing."""
        name = self._name(table)
        return {row[1] for row in self.database.execute(f'PRAGMA table_info("{name}")')}

    def _name(self, table: str) -> str:
        return self._newest.get(table, (0, table))[1]

    def select(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table. The values of missing columns are None."""
        if having := self._columns(table):
            chosen = ", ".join(f'"{c}"' if c in having else "NULL" for c in columns)
            yield from self.database.execute(f'SELECT {chosen} FROM "{self._name(table)}"')

    def _activities(self) -> Iterator[tuple[int, Activity]]:
        """Yield the activities on all GPUs, each with its device number."""
        calls = self.select("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
        launched = {_key(thread, number): start for start, thread, number in calls}
        for table in DEVICE_TABLES:
            columns = ("start", "end", "deviceId", "globalPid", "correlationId")
            rows = self.select(f"CUPTI_ACTIVITY_KIND_{table}", *columns)
            for start, end, device, process, number in rows:
                when = launched.get(_key(process, number), start) if number else start
                yield device, Activity(start, end, when)

    def _ranges(self) -> Iterator[Range]:
        rows = self.select("NVTX_EVENTS", "start", "end", "eventType", "text", "textId")
        columns = self._columns("NVTX_EVENTS")
        if columns and (missing := {"start", "end", "eventType"} - columns):
            raise sqlite3.DatabaseError(f"{self._name('NVTX_EVENTS')} has no {min(missing)}")
        for start, end, kind, text, identifier in rows:
            place, _, label = str(text or self.strings.get(identifier, "")).partition(":")
            step, _, phase = label.partition(".")
            if kind == START_END_RANGE and place == NVTX_DOMAIN and end and step.isdecimal():
                yield Range(int(step), phase, start, end)

    def _version(self) -> str:
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            for name, value in self.select(table, "name", "value"):
                if name == "EXPORT_PRODUCT_VERSION":
                    return str(value)
        return "unknown"


def _key(process_or_thread: int | None, number: int | None) -> tuple[int, int | None]:
    """Return the number of the process and the correlation number.

    A CUDA call and the activity that the call launched have the same key.
    """
    return (process_or_thread or 0) >> PID_BITS, number
