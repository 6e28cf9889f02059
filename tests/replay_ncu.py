"""Stands in for ``ncu`` where there is no GPU: replays a run recorded on an NVIDIA H200.

Started with ncu's own command line. It copies the recorded report of the trainer that the
command names to where ``--export`` says, and prints what ncu and the process printed then. A
trainer for which nothing was recorded fails as a crashed process does.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"


def main() -> int:
    """Replay."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("Version 2025.3.1.0 (build 36398880) (public-release)")
        return 0
    export = Path(arguments[arguments.index("--export") + 1])
    trainer = arguments[arguments.index("--trainer") + 1]
    with (export.parent / "measured.txt").open("a") as stream:  # what was measured, and how often
        stream.write(f"{export.stem}\n")
    recorded = DATA / "tiny-fp32" / f"report_{trainer}_bs4_seq64.ncu-rep"
    if not recorded.exists():
        error = {"kind": "RuntimeError", "message": f"no recording of {trainer}"}
        print(json.dumps({"dpbench": "0", "error": error}))
        return 1
    shutil.copy(recorded, export)
    print((DATA / "ncu_output" / "success.txt").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
