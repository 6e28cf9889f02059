"""The words that a measured process and its parent say to each other.

The process prints to its log, where a trainer and its libraries print as well. So the line of its
record begins with a mark of this one start, which its parent gave it in the environment; where
nobody did, as by hand, the line is plain JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

WAITING = "dpbench: waiting for"
"""Printed before the process waits for its GPU, and whenever another process holds that."""

MEASURING = "dpbench: measuring"  # printed when it has its GPU
NVTX_DOMAIN = "dpbench"  # the NVTX domain of the ranges by which a profiler knows a step's phases
NVTX_END = "end"
"""The name of the last range of a run. Nsight Compute's reader takes a truncated report for a
shorter one; a report without this range is incomplete."""

MARK = "DPBENCH_RECORD_MARK"
"""The environment variable with the mark."""


def print_record(**record: Any) -> None:
    """Print the record of what this process did, or why it failed: plain JSON types."""
    try:
        version = metadata.version("dpbench")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        version = "0.0.0"
    mark = os.environ.get(MARK, "")
    own_line = "\n" if mark else ""  # a trainer may have left the last line open
    print(own_line + mark + json.dumps({"dpbench": version, **record}), flush=True)


def is_record(line: str) -> bool:
    """Whether a line of a log is a record, which is not for people."""
    return re.match(r'[0-9a-f]{16} \{"dpbench": ', line) is not None


def last_record(lines: Iterable[str], mark: str) -> dict[str, Any]:
    """The last record among the lines of a log; empty if there is none, or it was cut off."""
    marked = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    try:
        record = json.loads(marked[-1]) if marked else {}
    except json.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}
