"""Measure the runs from which the documents' tables are made, in several calls if necessary.

    python -m bench.measure --list            # print the command of each file
    python -m bench.measure --minutes 9       # stop after 9 minutes; the next call continues
    python -m bench.measure methods-tf32      # measure only this file, into the folder measured

``docs/results/evidence.toml`` lists the files. When the minutes are over, a call interrupts
its current run, and ends. The interrupted run keeps its complete cases, and the next call resumes
the run. The checkout
must be clean, and nothing else may run on the machine.
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

from bench.runs import RESULTS, ROOT, file_of, text_of, write_packed

PLAN: dict[str, str] = tomllib.loads((RESULTS / "evidence.toml").read_text("utf-8"))["measured"]
"""Options of ``dpbench run`` for each file, by the file's name as in `bench.runs`."""


def command(name: str, options: str, into: Path) -> list[str]:
    """Return the command that measures the run of a file, or resumes this run if interrupted."""
    kept = ["--save", name, "--resume", "--storage", str(into / "runs")]
    return [
        *(sys.executable, "-m", "dpbench", "run", *shlex.split(options)),
        *(*kept, "--json", str(into / Path(file_of(name)).stem)),
    ]


def is_complete(file: Path) -> bool:
    """Return True if a file exists and contains a complete run."""
    return file.exists() and json.loads(text_of(file))["session"]["status"] == "complete"


def pack(file: Path) -> None:
    """Replace the JSON file of a complete run by a compressed file, whose name ends in ``.xz``."""
    if is_complete(file):
        write_packed(file.with_name(f"{file.name}.xz"), text_of(file))
        file.unlink()


def measure(plan: Mapping[str, str], into: Path, seconds: float) -> list[str]:
    """Measure runs until the time is over. Return the names of runs that are not complete."""
    end = time.monotonic() + seconds
    for name, options in plan.items():
        if is_complete(into / file_of(name)):
            print(f"{name}: {into / file_of(name)} is complete")
            continue
        if time.monotonic() >= end:
            continue
        process = subprocess.Popen(command(name, options, into), cwd=ROOT)
        try:
            process.wait(end - time.monotonic())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        pack(into / Path(file_of(name)).stem)
    return [name for name in plan if not is_complete(into / file_of(name))]


def main() -> int:
    """Measure the runs that the command line names, or print their commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="measure only these files")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this (default 9)")
    parser.add_argument(
        "--into", type=Path, default=ROOT / "measured", metavar="FOLDER", help="default measured"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args()
    if unknown := {*options.names} - {*PLAN}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PLAN)}")
    plan = {name: PLAN[name] for name in options.names or PLAN}
    if options.list:
        for name, chosen in plan.items():
            print(shlex.join(command(name, chosen, options.into)))
        return 0
    if missing := measure(plan, options.into, options.minutes * 60):
        print(f"not complete: {', '.join(missing)}; if time was over, call again to continue")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
