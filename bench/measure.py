"""Measure the evidence of the documents, one file after another, in as many calls as it takes.

    python -m bench.measure --list            # the command of each file
    python -m bench.measure --minutes 9       # go on where the last call stopped
    python -m bench.measure methods-tf32      # only these files

``docs/results/evidence.toml`` has the files. A call ends when its minutes are over: it interrupts
the run that it is at, which keeps what is complete, and the next call resumes that run. It wants a
clean checkout and nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from bench.runs import RESULTS, ROOT, file_of

PLAN: dict[str, str] = tomllib.loads((RESULTS / "evidence.toml").read_text("utf-8"))["measured"]
"""The options of ``dpbench run`` by the name of its file."""


def command(name: str, options: str, into: Path) -> list[str]:
    """The argument list that begins a file, or goes on with it."""
    kept = ["--save", name, "--resume", "--storage", str(into / "runs")]
    return [
        *(sys.executable, "-m", "dpbench", "run", *shlex.split(options)),
        *(*kept, "--json", str(into / file_of(name))),
    ]


def is_complete(file: Path) -> bool:
    """Whether a file is there, and no case is missing."""
    if not file.exists():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8"))["session"]["status"] == "complete")


def measure(plan: Mapping[str, str], into: Path, seconds: float) -> list[str]:
    """Measure for so long; returns the files that are not complete yet."""
    end = time.monotonic() + seconds
    for name, options in plan.items():
        if is_complete(into / file_of(name)) or time.monotonic() >= end:
            continue
        process = subprocess.Popen(command(name, options, into), cwd=ROOT)
        try:
            process.wait(end - time.monotonic())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    return [name for name in plan if not is_complete(into / file_of(name))]


def main() -> int:
    """Measure, or list what would be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these files")
    parser.add_argument("--minutes", type=float, default=9.0, help="end after so long (default 9)")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    if unknown := {*options.names} - {*PLAN}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PLAN)}")
    plan = {name: PLAN[name] for name in options.names or PLAN}
    if options.list:
        for name, chosen in plan.items():
            print(shlex.join(command(name, chosen, options.into)))
        return 0
    if missing := measure(plan, options.into, options.minutes * 60):
        print(f"to be completed by further calls: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
