"""The messages between a measured process and its parent.

The parent chooses how many steps to take, and which of them the PyTorch profiler records. The
process appends records, one line of JSON each, to the file named by `RECORDS`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpbench.child.imported import imported_files
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import parameters_text, read_parameters
from dpbench.core.parameters import arguments

WAITING, MEASURING = "waiting for", "measuring"
"""Keys of status records: the process waits for its GPU, or has it. All other records are
results."""

LOST = re.compile(r"gloo/transport|DistBackendError|DistNetworkError|DistStoreError")
"""Matches errors of ranks that fail because another rank has ended."""

NVTX_DOMAIN = "dpbench"  # the NVTX domain of the ranges by which a profiler knows a step's phases
NVTX_END = "end"
"""The name of the last range of a run. Nsight Compute's reader cannot tell a truncated report from
a shorter one, but a report without this range is incomplete."""

POLL_SECONDS = 0.05
"""Seconds between two reads of a file that another process writes."""

RECORDS = "DPBENCH_RECORDS"
"""The environment variable with the path of the records file."""


def append_record(record: dict[str, Any], path: str | None = None) -> None:
    """Append a record of plain JSON types to ``path``, by default the file named by `RECORDS`."""
    if path := path or os.environ.get(RECORDS):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record)}\n")


def report_result(**record: Any) -> None:
    """Append this process's result or error; print it if the process has no parent to read it."""
    if RECORDS in os.environ:
        append_record(record | {"imported": imported_files()})
    else:
        print(json.dumps(record), flush=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The complete records in a file; one that is still being written is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def result_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The last record that is a result; empty if there is none."""
    results = [record for record in records if not record.keys() & {WAITING, MEASURING}]
    return results[-1] if results else {}


@dataclass(frozen=True)
class Steps:
    """Numbers of steps of a measured process: ``warmup`` unobserved, then ``active`` observed."""

    warmup: int
    active: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.active < 1:
            raise ConfigurationError(
                f"steps: needs warm-up >= 0 and active >= 1, not {self.warmup} and {self.active}"
            )


@dataclass(frozen=True)
class Schedule:
    """The arguments of ``torch.profiler.schedule``, in steps."""

    skip_first: int = 1  # steps before the first cycle; the first step initialises libraries
    wait: int = 0  # in each cycle, steps without the profiler
    warmup: int = 1  # steps that it traces and discards
    active: int = 1  # steps that it records
    repeat: int = 1  # cycles

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("active", "repeat") else 0
            if value < least:
                raise ConfigurationError(
                    f"profiler schedule: {name} must be >= {least}, not {value}"
                )

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule such as ``wait=1,active=3``; missing fields have their defaults."""
        given = read_parameters(parameters_text(text))
        return cls(**arguments("a profiler schedule", cls, given))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def steps(self) -> int:
        """How many training steps the whole schedule takes."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
