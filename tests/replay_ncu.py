"""Replay a run of ``ncu`` that was recorded on an NVIDIA H200, on a machine without a GPU.

Tests start this program with ncu's command line. It copies the recorded report of the command's
trainer to the file in ``--export``, and prints what ncu and the process printed. For kernel replay
there is a report of all phases and a report of the clip phase, which the NVTX filter chooses. The
clip phase of standard training has no kernels. For a trainer without a recording, the program fails
like a crashed process.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from dpbench.child.messages import report
from dpbench.child.task import Task
from dpbench.core.errors import CaseFailed
from dpbench.core.subject import Subject
from dpbench.results.outcome import Outcome

DATA = Path(__file__).parent / "data"


def recording(arguments: list[str]) -> str:
    """Return the folder below `DATA` with the recording for a command line."""
    if arguments[arguments.index("--replay-mode") + 1] != "kernel":
        return "tiny-fp32"
    if arguments[arguments.index("--nvtx-include") + 1] == "dpbench@0.clip":
        return "tiny-fp32/kernels/clip"
    return "tiny-fp32/kernels"


def read(path: Path) -> bytes:
    """Read a recorded file, which may be compressed."""
    return path.read_bytes() if path.exists() else lzma.decompress(Path(f"{path}.xz").read_bytes())


def say(log: str, case: Subject) -> None:
    """Print a recorded log, and report the record in it as a measured process does."""
    for line in log.splitlines():
        if line.startswith('{"dpbench"'):
            details = json.loads(line) | {"observed": 1}
            report(Outcome(case, (), labels=details.get("labels", {}), details=details))
        else:
            print(line)


def main() -> int:
    """Replay the recording for the command line."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("Version 2025.3.1.0 (build 36398880) (public-release)")
        return 0
    export = Path(arguments[arguments.index("--export") + 1])
    case = Task.read(Path(arguments[arguments.index("--task") + 1])).case
    trainer = case.trainer
    with (export.parent / "measured.txt").open("a") as stream:  # a line for each measurement
        stream.write(f"{export.stem}\n")
    folder = recording(arguments)
    recorded = DATA / folder / f"report_{trainer}_bs4_seq64.ncu-rep"
    if folder.endswith("clip") and trainer == "standard":  # it does not clip
        say((DATA / "ncu_output/success.txt").read_text(), case)
        print("==WARNING== No kernels were profiled.")
        export.write_bytes((DATA / "ncu_output/nothing.ncu-rep").read_bytes())
        return 0
    try:
        export.write_bytes(read(recorded))
    except FileNotFoundError:
        report(Outcome.failed(case, CaseFailed(f"no recording of {trainer}")))
        return 1
    in_ranges = folder == "tiny-fp32"
    log = DATA / "ncu_output/success.txt" if in_ranges else recorded.with_suffix(".log")
    say(read(log).decode(), case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
