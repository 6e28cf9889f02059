"""Messages between a measured process and its parent process.

The parent chooses how many steps to take, and which steps the PyTorch profiler records. The
measured process appends records, one line of JSON each, to the file named by `RECORDS`. If it is to
end because it hangs, it first writes its Python stack.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpbench.child.imported import heard, imported_files
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import arguments, parameters_text, read_parameters
from dpbench.results.outcome import Outcome

WAITING, MEASURING = "waiting for", "measuring"
"""Keys of status records, which say that the process waits for the GPU's lock or holds the lock. A
record without these keys is an `Outcome`."""

LOST = re.compile(r"gloo/transport|DistBackendError|DistNetworkError|DistStoreError")
"""Matches the errors of a rank that failed because another rank had ended."""

NVTX_DOMAIN = "dpbench"
"""NVTX domain of the ranges that mark phases for a profiler."""

NVTX_END = "end"
"""Name of the last NVTX range of a process. A profiler's report without this range is incomplete:
Nsight Compute's reader accepts truncated reports without an error."""

POLL_SECONDS = 0.05
"""Seconds between two attempts to read a file that another process writes."""

RECORDS = "DPBENCH_RECORDS"
"""Environment variable with the path of the records file."""


STACK = "stack"
"""Name of the file to which Python's faulthandler writes the stack."""

STACK_SIGNAL = "SIGURG"
"""The signal that asks ranks to write their stacks. By default a process ignores this signal.
SIGTERM cannot be used: the launcher also sends SIGTERM, which would interrupt the writing."""

COLLECTIVES = ("autograd", "cuda", "distributed", "nn/parallel")
"""Folders of PyTorch whose functions wait for other ranks, directly or through the GPU."""

BETWEEN_STEPS = str(Path(__file__).parents[1] / "training/parallel.py"), "all_gather"
"""File and name of the function in which ranks wait for each other between steps."""

WAITED = "waited for other ranks"

FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def append_record(record: dict[str, Any], path: str | None = None) -> None:
    """Append a record of plain JSON types to ``path``, by default the file named by `RECORDS`."""
    if path := path or os.environ.get(RECORDS):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record)}\n")


def report(outcome: Outcome) -> None:
    """Append an outcome to the records file. Without `RECORDS`, print it."""
    if RECORDS in os.environ:
        imported = imported_files() | heard()
        append_record(replace(outcome, imported=imported).as_json())
    else:
        print(json.dumps(outcome.as_json()), flush=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the complete records in a file. A partly written last record is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def reported(path: Path) -> Outcome | None:
    """Return the last outcome in a records file, or None if there is none."""
    records = [r for r in read_records(path) if not r.keys() & {WAITING, MEASURING}]
    return Outcome.from_json(records[-1]) if records else None


# --- where a process hung --------------------------------------------------------------------


def where_stuck(stack: str) -> tuple[bool, str]:
    """Return whether a rank waited for other ranks in a collective, and where the rank was.

    The stack is empty if the rank was not asked for its stack, or was ended before it wrote the
    stack. A rank without a stack counts as waiting.
    """
    frames = FRAME.findall(stack.rpartition("(most recent call first)")[2])
    if not frames:
        return True, "left no stack"
    if any((file, name) == BETWEEN_STEPS for file, _, name in frames):
        return False, "had finished its steps"
    of_torch = str(Path(str(getattr(find_spec("torch"), "origin", ""))).parent)
    waited = frames[0][0].startswith(tuple(f"{of_torch}/{part}" for part in COLLECTIVES))
    others = (of_torch, str(Path(__file__).parent))  # dpbench's step finder wraps PyTorch's calls
    own = (frame for frame in frames if not frame[0].startswith(others))
    file, line, name = next(own, frames[-1])
    return waited, f"{WAITED if waited else 'was'} in {name} ({Path(file).name}:{line})"


# --- numbers of steps ------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Numbers of steps of a measured process: first the warm-up steps, then the active steps."""

    warmup: int
    active: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.active < 1:
            raise ConfigurationError(
                f"the numbers of steps must be warm-up >= 0 and active >= 1, not {self.warmup} "
                f"and {self.active}"
            )


@dataclass(frozen=True)
class Schedule:
    """Arguments of ``torch.profiler.schedule``.

    Attributes:
        skip_first: number of steps before the first cycle. The first step initialises libraries.
        wait: number of steps without the profiler at the start of each cycle.
        warmup: number of steps in each cycle that the profiler traces and discards.
        active: number of steps in each cycle that the profiler records.
        repeat: number of cycles.
    """

    skip_first: int = 1
    wait: int = 0
    warmup: int = 1
    active: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("active", "repeat") else 0
            if value < least:
                raise ConfigurationError(
                    f"profiler schedule: {name} must be >= {least}, not {value}"
                )

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule such as ``wait=1,active=3``. Missing fields have their defaults."""
        given = read_parameters(parameters_text(text))
        return cls(**arguments("a profiler schedule", cls, given))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def steps(self) -> int:
        """Number of training steps of the whole schedule."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
