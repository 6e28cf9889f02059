"""Writes SQLite files as ``nsys export`` does, with what a test wants to have happened.

Tables and columns are those that Nsight Systems' exporter makes (schema 3.0.0 of 2022.4.2, by
``nsys export --type sqlite --lazy=false`` of a report with NVTX ranges); columns that no reader
could need are left out.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

COLUMNS = {
    "StringIds": "id, value",
    "EXPORT_META_DATA": "name, value",
    "TARGET_INFO_GPU": "vmId, id, name",
    "ENUM_CUDA_MEMCPY_OPER": "id, name, label",
    "DIAGNOSTIC_EVENT": "timestamp, severity, text",
    "NVTX_EVENTS": "start, end, eventType, rangeId, text, globalTid, textId, domainId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId, returnValue",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, "
    "demangledName, shortName",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, "
    "bytes, copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start, end, deviceId, streamId, correlationId, globalPid, "
    "value, bytes",
}

PROCESS, THREAD = 77 << 24, (77 << 24) + 78
DEVICE_TO_DEVICE = 8
FILL = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, "
    "std::array<char *, (unsigned long)1>>(int, T2, T3)"
)
MICROSECOND = 1000


class Recording:
    """What was recorded; times in microseconds."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"StringIds": []}
        self.strings: dict[str, int] = {}
        self.calls = 0
        self.add("EXPORT_META_DATA", name="EXPORT_PRODUCT_VERSION", value="2022.4.2.1")
        self.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
        self.add("ENUM_CUDA_MEMCPY_OPER", id=DEVICE_TO_DEVICE, label="Device-to-Device")

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def range(self, name: str, start: float, end: float | None, **changed: Any) -> None:
        """An NVTX start/end range; registered strings have an id, others a text."""
        stop = None if end is None else end * MICROSECOND
        values = {"eventType": 60, "globalTid": THREAD, "textId": self.string(name), **changed}
        self.add("NVTX_EVENTS", start=start * MICROSECOND, end=stop, **values)

    def call(self, name: str, start: float, end: float, thread: int = THREAD) -> int:
        """A call of CUDA; returns its correlation number."""
        self.calls += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start * MICROSECOND,
            end=end * MICROSECOND,
            globalTid=thread,
            correlationId=self.calls,
            nameId=self.string(name),
        )
        return self.calls

    def kernel(
        self,
        start: float,
        end: float,
        *,
        launched: float | None = None,
        name: str = FILL,
        **more: Any,
    ) -> None:
        """A kernel, launched by a call of 5 µs at a time, if at all."""
        named = {"demangledName": self.string(name), "shortName": self.string("short")}
        self._device("KERNEL", start, end, launched, "cudaLaunchKernel_v7000", named | more)

    def copy(self, start: float, end: float, moved: int, launched: float | None = None) -> None:
        kind = {"bytes": moved, "copyKind": DEVICE_TO_DEVICE}
        self._device("MEMCPY", start, end, launched, "cudaMemcpyAsync_v3020", kind)

    def memset(self, start: float, end: float, moved: int, launched: float | None = None) -> None:
        self._device("MEMSET", start, end, launched, "cudaMemsetAsync_v3020", {"bytes": moved})

    def _device(
        self,
        table: str,
        start: float,
        end: float,
        launched: float | None,
        by: str,
        more: Mapping[str, Any],
    ) -> None:
        number = None if launched is None else self.call(by, launched, launched + 5)
        values = {
            "start": start * MICROSECOND,
            "end": end * MICROSECOND,
            "deviceId": 0,
            "correlationId": number,
            "globalPid": PROCESS,
        }
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", **{**values, **more})

    def write(self, path: Path) -> Path:
        for text, number in self.strings.items():
            self.add("StringIds", id=number, value=text)
        with closing(sqlite3.connect(path)) as database:
            for table, rows in self.rows.items():
                database.execute(f"CREATE TABLE {table} ({COLUMNS[table]})")
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    names = ", ".join(f'"{name}"' for name in row)
                    values = [int(v) if isinstance(v, float) else v for v in row.values()]
                    database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)
            database.commit()
        return path


def case_recording() -> Recording:
    """A step by phase and two whole ones, as a case leaves them.

    By phase: forward 200 µs of which the GPU works 150, clip 100 of which it works 10. Whole: 300
    and 320 µs, busy 160, waiting 20 at the start and 90 or 110 for a copy of the clip phase, while
    the CPU called CUDA for 5, and 30 for the end of the step, in a call that synchronizes.
    """
    made = Recording()
    made.kernel(-50, -40, launched=-60, name="before")
    made.range("dpbench:0.outside", 0, 10)
    made.range("dpbench:0.forward", 10, 210)
    made.kernel(40, 150, launched=15)
    made.kernel(100, 190, launched=25)  # on another stream, at the same time
    made.range("dpbench:0.clip", 210, 310)
    made.copy(250, 260, 4_000_000, launched=215)
    for step, begin, slower in ((1, 1000, 0), (2, 2000, 20)):
        made.range(f"dpbench:{step}.step", begin, begin + 300 + slower)
        made.range(f"dpbench:{step}.outside", begin, begin + 5)
        made.range(f"dpbench:{step}.forward", begin + 5, begin + 100)
        made.kernel(begin + 20, begin + 170, launched=begin + 10)
        made.range(f"dpbench:{step}.clip", begin + 100, begin + 300 + slower)
        made.copy(begin + 260 + slower, begin + 270 + slower, 4_000_000, begin + 200)
        made.call("cudaDeviceSynchronize_v3020", begin + 265 + slower, begin + 299 + slower)
    made.range("someone else's", 0, 5000)
    made.range("dpbench:9.forward", 4000, None)
    return made
