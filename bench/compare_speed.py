"""How long saved runs take to load and compare.

Writes two runs of 10 000 rows or more to a temporary folder, the rows of a committed run under
further sequence lengths, and prints the seconds that loading both and comparing them take.

    python bench/compare_speed.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from dpbench.results.compare import Threshold
from dpbench.results.gate import Gate
from dpbench.results.run import Run

ROWS = 10_000
RECORDED = Path(__file__).parents[1] / "docs" / "results" / "h200-ncu-grid1-1.json"


def enlarged(document: dict[str, object], rows: int) -> dict[str, object]:
    """The document with copies of all its cases until it has that many rows."""
    one = document["rows"]
    assert isinstance(one, list)
    copies = -(-rows // len(one))
    many = [{**row, "seq_len": row["seq_len"] + i} for i in range(copies) for row in one]
    return {**document, "rows": many, "cases": []}


def main() -> None:
    """Print the seconds."""
    document = enlarged(json.loads(RECORDED.read_text()), ROWS)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.json" for name in ("before", "after")]
        for path in paths:
            path.write_text(json.dumps(document, indent=1))
        start = time.perf_counter()
        before, after = map(Run.load, paths)
        loaded = time.perf_counter()
        limits = [Threshold.parse("dram_bytes:5%"), Threshold.parse("l2_ratio:3%")]
        verdict = Gate(before, after).judge(limits)
        end = time.perf_counter()
    compared, judged = len(verdict.changes), len(verdict.judged)
    print(f"{len(before.frame)} rows a run, {compared} numbers, {judged} judged")
    print(f"load both {loaded - start:.2f} s, compare {end - loaded:.2f} s")


if __name__ == "__main__":
    main()
