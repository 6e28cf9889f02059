"""What profiling costs: wall time of one case's process, profiled and not, same steps.

Run on a GPU machine: ``python bench/profiling_overhead.py``. Prints one line per trainer with
the median of three alternating pairs, and the size of the report.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from dpbench import TRAINERS, Case
from dpbench.instruments.case_process import Child, step_command
from dpbench.instruments.ncu.ncu import Ncu
from dpbench.instruments.ncu.program import find_ncu


def seconds(command: list[str], case: Case, log: Path) -> float:
    """Wall time of a case's process."""
    start = time.monotonic()
    child = Child(command, case=case, log=log, timeout=600, read=lambda _: [])
    child.record()
    return time.monotonic() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", nargs="+", default=list(TRAINERS))
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    print("1b, batch 8, sequence 256, fp32; seconds of a whole process, median of the pairs")
    print(f"{'trainer':12} {'profiled':>9} {'plain':>7} {'ratio':>6} {'report MB':>10}")
    for trainer in options.trainer:
        case = Case(trainer, 8, 256)
        with tempfile.TemporaryDirectory() as folder:
            ncu = Ncu(Path(folder), path=find_ncu())
            log = Path(folder) / "log"
            plain_command = step_command(case, ncu.steps, device="cuda")
            (Path(folder) / case.report_path).parent.mkdir()
            pairs = [
                (seconds(ncu.command(case), case, log), seconds(plain_command, case, log))
                for _ in range(options.pairs)
            ]
            size = (Path(folder) / case.report_path).stat().st_size / 1e6
        profiled, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{trainer:12} {profiled:9.1f} {plain:7.1f} {ratio:6.2f} {size:10.2f}")


if __name__ == "__main__":
    main()
