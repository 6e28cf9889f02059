"""Reading what ``nsys export --type sqlite`` wrote; needs neither a GPU nor Nsight Systems.

The tables are described in NVIDIA's "SQLite Export Schema Reference"
(https://docs.nvidia.com/nsight-systems/nsys-exporter/exported_data.html). A table without events
is missing, and so are columns in files of older versions.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dpbench.instruments.interface import InstrumentError
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.results.kernels import short_name
from dpbench.results.timeline import Activity, Call, Range, Timeline

START_END_RANGE = 60
"""``NvtxStartEndRange`` in ``ENUM_NSYS_EVENT_TYPE``."""

DEVICE_TABLES = {
    "KERNEL": ("kernel", "demangledName"),
    "MEMCPY": ("memcpy", "copyKind"),
    "MEMSET": ("memset", "NULL"),
    "GRAPH_TRACE": ("graph", "NULL"),
}
"""Tables of what ran on the device: its kind, and the column that names it."""

PID_BITS = 24
"""In ``globalPid`` and ``globalTid`` the bits below these number a thread."""


class TimelineUnreadable(InstrumentError):
    """A file that is missing, cut off, or no export of Nsight Systems."""

    remedy = "export it again: nsys export --type sqlite FILE.nsys-rep"


class NothingTraced(InstrumentError):
    """A timeline on which the GPU did nothing."""

    remedy = (
        "a step must run its work inside `trainer.train_step`, on a GPU whose driver this nsys "
        "supports, and no other profiler may hold CUPTI"
    )


def read_timeline(path: Path, named: Path | None = None) -> Timeline:
    """The timeline in an exported file; errors name the one that a person named."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _Export(database).timeline(named or path)
    except sqlite3.Error as error:
        raise TimelineUnreadable(f"{path}: not an export of Nsight Systems ({error})") from error


class _Export:
    """An open file: its strings, and which columns its tables have."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        if not self._columns("StringIds"):
            raise sqlite3.DatabaseError("no table StringIds")
        self.strings: dict[int, str] = dict(self.select("StringIds", "id", "value"))

    def timeline(self, path: Path) -> Timeline:
        calls, launched = [], {}
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        rows = self.select("CUPTI_ACTIVITY_KIND_RUNTIME", *columns)
        for start, end, thread, number, name in rows:
            calls.append(Call(start, end, re.sub(r"_v\d+$", "", self.strings.get(name, "?"))))
            launched[_key(thread, number)] = start
        by_device: dict[int, list[Activity]] = defaultdict(list)
        for device, activity in self._activities(launched):
            by_device[device].append(activity)
        if not by_device:
            said = "; ".join(text for (text,) in self.select("DIAGNOSTIC_EVENT", "text"))
            raise NothingTraced(f"{path}: no kernel, copy or memset was traced ({said or 'empty'})")
        names = {str(name) for (name,) in self.select("TARGET_INFO_GPU", "name")}
        return Timeline(
            names.pop() if len(names) == 1 else "a GPU",
            f"nsys {self._version()}",
            sorted(self._ranges(), key=lambda each: (each.start, -each.end)),
            sorted(by_device[max(by_device, key=lambda device: len(by_device[device]))]),
            sorted(calls),
        )

    def _columns(self, table: str) -> set[str]:
        """The columns of a table; none without it. A view, which may never end, is an error."""
        kinds = self.database.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'view' AND name = ? COLLATE NOCASE", (table,)
        )
        if kinds.fetchone():
            raise sqlite3.DatabaseError(f"{table} is a view")
        return {row[1] for row in self.database.execute(f"PRAGMA table_info({table})")}

    def select(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, NULL for columns that it lacks; nothing if it is not there."""
        if having := self._columns(table):
            chosen = ", ".join(f'"{c}"' if c in having else "NULL" for c in columns)
            yield from self.database.execute(f"SELECT {chosen} FROM {table}")

    def _activities(self, launched: Mapping[Any, int]) -> Iterator[tuple[int, Activity]]:
        """What ran on each device; without its call, its own start is when it was launched."""
        copies = dict(self.select("ENUM_CUDA_MEMCPY_OPER", "id", "label"))
        columns = ("start", "end", "deviceId", "correlationId", "globalPid", "bytes")
        for table, (kind, name) in DEVICE_TABLES.items():
            rows = self.select(f"CUPTI_ACTIVITY_KIND_{table}", *columns, name)
            for start, end, device, number, process, size, called in rows:
                if kind == "kernel":
                    what = short_name(self.strings.get(called, "?"))
                else:
                    what = f"{kind} {copies.get(called, '')}".strip()
                when = launched.get(_key(process, number), start) if number else start
                yield device, Activity(start, end, kind, what, when, size or 0)

    def _ranges(self) -> Iterator[Range]:
        rows = self.select("NVTX_EVENTS", "start", "end", "eventType", "text", "textId")
        for start, end, kind, text, identifier in rows:
            name = str(text or self.strings.get(identifier, ""))
            place, _, label = name.partition(":")
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
    """What a call and what it launched have in common: correlation numbers are a process's own."""
    return (process_or_thread or 0) >> PID_BITS, number
