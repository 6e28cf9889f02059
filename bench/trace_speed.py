"""How long reading a trace takes: one step of each trainer at 1b, or the traces named.

Run on a GPU machine: ``python bench/trace_speed.py``; anywhere: ``python bench/trace_speed.py
runs/*/trace_0.json.gz``. Prints one line per trace.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dpbench import TRAINERS, Case
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.instruments.torch_profiler.trace import read


def profiled(folder: Path) -> Iterator[Path]:
    """Profile a step of each trainer; yields the traces."""
    for trainer in TRAINERS:
        case = Case(trainer, 8, 256)
        TorchProfiler(folder).measure(case)
        yield folder / case.id / "trace_0.json.gz"


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.json.gz")
    options = parser.parse_args()
    print(f"{'MB':>6} {'launches':>9} {'seconds':>8}  trace")
    with tempfile.TemporaryDirectory() as folder:
        for path in options.traces or profiled(Path(folder)):
            start = time.perf_counter()
            found = read(path)
            seconds = time.perf_counter() - start
            size = path.stat().st_size / 1e6
            print(f"{size:6.2f} {len(found.launches):9} {seconds:8.2f}  {path.parent.name}")


if __name__ == "__main__":
    main()
