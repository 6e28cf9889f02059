"""How fast and how close the logical instrument is: ``python bench/logical_speed.py``.

Prints, for each trainer at 1b, batch 8, sequence 256: logical bytes and peak memory beside
what an H200 measured, and the time and peak resident memory of the process that counted.
Then the time that both named grids take with two worker processes.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from dpbench.case import Case
from dpbench.grid import GRIDS

H200 = {
    "standard": (61.6, 29.7, 13.0),
    "dpsgd": (220.7, 191.2, 59.6),
    "dpsgd_ghost": (139.7, 89.9, 18.3),
    "dpsgd_fgc": (228.9, 217.8, 21.8),
}
"""DRAM read, DRAM write and peak memory in GB: ncu 2025.3.1 and the CUDA allocator, torch 2.11,
Opacus 1.6.0, fp32 without TF32, one step of the 1b model at batch 8 × sequence 256."""


def count(case: Case) -> dict[str, float]:
    """GB by ``phase metric``, and seconds, for one case counted in this process."""
    from dpbench.instruments.logical.logical import Logical

    start = time.perf_counter()
    rows = Logical().measure(case)
    found = {f"{row.phase} {row.metric}": row.value / 1e9 for row in rows}
    found["seconds"] = time.perf_counter() - start
    found["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def in_own_process(trainer: str) -> None:
    """Count one case in a fresh process and print its line."""
    start = time.perf_counter()
    printed = subprocess.run(
        [sys.executable, __file__, trainer], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    wall = time.perf_counter() - start
    found = json.loads(printed)
    read, write, peak = H200[trainer]
    r, w = found["step logical_read_bytes"], found["step logical_write_bytes"]
    p = found["step peak_memory_bytes"]
    print(
        f"{trainer:12} read {r:6.1f}/{read:5.1f}  write {w:6.1f}/{write:5.1f}  "
        f"total {r + w:6.1f}/{read + write:5.1f} = {(r + w) / (read + write):.3f}  "
        f"peak {p:5.2f}/{peak:4.1f} = {p / peak:.3f}  "
        f"counted in {found['seconds']:.1f} s, process {wall:.1f} s, {found['rss']:.2f} GB RSS"
    )


def grids(workers: int) -> None:
    """Count every case of the named grids and print the time."""
    cases = [case for name in ("grid1", "grid2") for case in GRIDS[name].cases()]
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        largest = max(found["rss"] for found in pool.map(count, cases))
    seconds = time.perf_counter() - start
    print(f"{len(cases)} cases, {workers} processes: {seconds:.1f} s, at most {largest:.2f} GB RSS")


def main() -> None:
    """Everything, or the one trainer that is named."""
    if len(sys.argv) > 1:
        print(json.dumps(count(Case(sys.argv[1], batch_size=8, seq_len=256))))
        return
    print("logical / H200 DRAM, in GB; 1b, batch 8, sequence 256, fp32")
    for trainer in H200:
        in_own_process(trainer)
    grids(workers=2)


if __name__ == "__main__":
    main()
