"""Stands in for ``python -m dpbench step`` where there is no GPU: replays a recorded process.

Started with the command line of an unprofiled process it prints the record of one, with that of
the PyTorch profiler it leaves the files of one. It does so for the case and the steps that were
recorded; anything else fails as a crashed process does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from dpbench.case import ADDED
from dpbench.cli import build_parser
from dpbench.commands.options import chosen_case
from dpbench.commands.step import write_profile
from dpbench.instruments.torch_profiler import profile_folder as profile_files
from dpbench.options import own_values
from dpbench.process.messages import Schedule, print_record

DATA = Path(__file__).parent / "data"

profile_files.find_spec = lambda name: None  # TensorBoard's writer would load torch


def recording(options: argparse.Namespace) -> Path:
    """The recorded record of such a process, and how many steps it was told to take."""
    folder = "profile/standard" if options.profile else "timing"
    return DATA / folder / "record.json"


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a process with these options says that it did."""
    if options.profile:
        return {"schedule": vars(Schedule.parse(own_values(options)["profile_schedule"]))}
    return {"warmup": options.warmup, "active": options.active}


def main() -> int:
    """Replay."""
    options = build_parser("step").parse_args(sys.argv[4:])  # after python -P -m dpbench
    path, case = recording(options), chosen_case(options)
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, value in {"case": vars(case), **asked(options)}.items():
        found = {**ADDED, **record[name]} if name == "case" else record[name]
        if found != value:
            error = {"kind": "RuntimeError", "message": f"no recording of {name} {value}"}
            print_record(error=error)
            return 1
    if options.profile:
        profile_files.prepare(options.profile)
        shutil.copytree(path.parent, options.profile, dirs_exist_ok=True)
        threshold = own_values(options)["profile_threshold"]
        write_profile(case, record, options.profile, threshold)
    print_record(**record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
