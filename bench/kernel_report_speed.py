"""How long a large kernel-replay report takes to read.

A report is a header and blocks, so a large one is made of a recorded one by repeating its blocks;
or name a real one:

    python bench/kernel_report_speed.py [REPORT.ncu-rep]
"""

from __future__ import annotations

import lzma
import os
import sys
import tempfile
import time
from pathlib import Path

from dpbench.instruments.ncu.report import read_kernels
from dpbench.results.kernels import fold

RECORDED = Path(__file__).parents[1] / "tests/data/tiny-fp32/kernels/report_dpsgd_bs4_seq64.ncu-rep"
KERNELS = 5_000
HEADER_BYTES = 10


def large_report(directory: Path) -> Path:
    """A report of at least `KERNELS` kernels."""
    whole = lzma.decompress(Path(f"{RECORDED}.xz").read_bytes())
    path = directory / "large.ncu-rep"
    path.write_bytes(whole[:HEADER_BYTES] + whole[HEADER_BYTES:] * -(-KERNELS // 468))
    return path


def main() -> None:
    """Print seconds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(sys.argv[1]) if sys.argv[1:] else large_report(Path(directory))
        for _ in range(3):
            start = time.perf_counter()
            launches = read_kernels(path).launches
            read = time.perf_counter() - start
            counts = fold(launches)
            print(
                f"{len(launches)} kernels, {path.stat().st_size / 1e6:.1f} MB, {os.cpu_count()} "
                f"CPUs: read in {read:.2f} s, folded to {len(counts)} in "
                f"{time.perf_counter() - start - read:.3f} s"
            )


if __name__ == "__main__":
    main()
