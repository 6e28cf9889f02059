"""The messages between a measured process and its parent.

The parent says how many steps to take, and which of them the PyTorch profiler records. The process
prints its record, a line of JSON, to its log, where a trainer and its libraries print as well. The
line begins with a mark that the parent has set in the environment, new for each process; without
one, as for a command by hand, it is plain JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from dpbench.errors import ConfigurationError, unknown
from dpbench.process.imported import imported_files

WAITING = "dpbench: waiting for"
"""Printed before the process waits for its GPU, and whenever another process holds that."""

MEASURING = "dpbench: measuring"  # printed when it has its GPU
LOST = re.compile(r"gloo/transport|DistBackendError|DistNetworkError|DistStoreError")
"""What ranks fail with because another one has ended."""

NVTX_DOMAIN = "dpbench"  # the NVTX domain of the ranges by which a profiler knows a step's phases
NVTX_END = "end"
"""The name of the last range of a run. Nsight Compute's reader takes a truncated report for a
shorter one; a report without this range is incomplete."""

MARK = "DPBENCH_RECORD_MARK"
"""The environment variable with the mark."""


def print_record(**record: Any) -> None:
    """Print this process's record: its result or its error, as plain JSON types."""
    mark = os.environ.get(MARK, "")
    own_line = "\n" if mark else ""  # a trainer may have left the last line open
    record["imported"] = imported_files() if mark else {}
    print(own_line + mark + json.dumps(record), flush=True)


def is_record(line: str) -> bool:
    """Whether a line of a log is a record."""
    return re.match(r'[0-9a-f]{16} \{"', line) is not None


def last_record(lines: Iterable[str], mark: str) -> dict[str, Any]:
    """The last record among the lines of a log; empty if there is none, or it was cut off."""
    marked = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    try:
        record: dict[str, Any] = json.loads(marked[-1]) if marked else {}
    except json.JSONDecodeError:
        return {}
    return record


@dataclass(frozen=True)
class Steps:
    """How many steps a child runs before it is observed, and how many while it is."""

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

    skip_first: int = 1  # before anything else; the first step initialises libraries
    wait: int = 0  # of each cycle, those that the profiler sleeps through
    warmup: int = 1  # those that it traces and throws away
    active: int = 1  # those that it records
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
        """A schedule such as ``wait=1,active=3``; what is left out keeps its default."""
        known = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise unknown("part of a profiler schedule", name, known, "as in wait=1,active=3")
            if not value.isdecimal():
                raise ConfigurationError(
                    f"profiler schedule: {name} must be a whole number, not {value!r}"
                )
            values[name] = int(value)
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def steps(self) -> int:
        """How many training steps the whole schedule takes."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
