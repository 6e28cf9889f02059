"""Whether the batches that ``dpbench fit`` finds fit a GPU, and how much larger ones do.

    python bench/fit.py > docs/results/h200-fit.txt

For each pair of model and trainer the largest batch is counted for this GPU, all pairs at once and
without using it, then measured on it: first that batch, then ones larger by 5 and by 10 percent,
until one runs out of memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from dpbench import gpu
from dpbench.case import AXES
from dpbench.commands.options import add_case, chosen_case
from dpbench.fit import largest_batch, parse_memory
from dpbench.show.layout import Shown, Table, as_text, gigabytes

GPT2 = "--workload hf-causal-lm --set seq_len=256 --set model_type=gpt2"
PAIRS = (
    "--trainer dpsgd --model-size 1b --seq-len 256 --precision fp32",
    "--trainer dpsgd_ghost --model-size 1b --seq-len 256 --precision bf16",
    "--trainer fused --model-size 1b --seq-len 256 --precision fp32",
    f"--trainer lean {GPT2} --precision fp32",
    "--trainer dpsgd --workload resnet --set depth=50 --precision fp32",
)
"""Options of ``dpbench run`` that say a model and a trainer."""

LARGER = (1.0, 1.05, 1.1)
"""The batches that are tried, as multiples of the one that is said to fit."""


@dataclass(frozen=True)
class Counted:
    """What was counted of a pair: the largest batch, its peak in bytes, and in how many seconds."""

    case: str
    batch: int
    peak: float
    seconds: float


def count(pair: str, memory: float) -> Counted:
    """Find the largest batch of a pair in so many bytes."""
    parser = argparse.ArgumentParser()
    add_case(parser, [axis for axis in AXES if axis != "batch_size"], device="cpu")
    case = chosen_case(parser.parse_args(shlex.split(pair)), batch_size=1)
    start = time.monotonic()
    found = largest_batch(case, memory)
    seconds = time.monotonic() - start
    name = f"{case.trainer}, {case.configuration}"
    return Counted(name, found.batch_size, found.needs.memory, seconds)


def measured_peak(pair: str, batch: int) -> float | None:
    """Train a batch of this size for two steps; its peak in bytes, or none if it did not fit.

    Raises:
        RuntimeError: it failed for another reason.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        options = f"--instrument timing --warmup 1 --active 1 --batch-size {batch}"
        command = [sys.executable, "-m", "dpbench", "run", *shlex.split(f"{options} {pair}")]
        done = subprocess.run(
            [*command, "--json", str(file), "--storage", folder], capture_output=True, text=True
        )
        if done.returncode == 0:
            rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            peaks = (row["value"] for row in rows if row["metric"] == "peak_memory_bytes")
            return float(max(peaks))
    if "out of memory" not in (said := done.stdout + done.stderr):
        raise RuntimeError(f"{shlex.join(command)}:\n{said[-2000:]}")
    return None


def tried(pair: str, counted: Counted) -> dict[str, object]:
    """A line of the table: the batch that was counted, and what larger ones did."""
    line: dict[str, object] = {"case": counted.case, "batch": counted.batch, "peak": counted.peak}
    line |= {"seconds": counted.seconds, "measured": None, "fails": None}
    for factor in LARGER:
        batch = max(round(counted.batch * factor), counted.batch)
        peak = measured_peak(pair, batch)
        if peak is None:
            line["fails"] = batch
            break
        line |= {"fits": batch, "measured": line["measured"] or peak}
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a batch that was to fit does not, or one larger by 10 percent does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", metavar="SIZE", help="instead of that of this GPU")
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="OPTIONS")
    options = parser.parse_args(arguments)
    if options.memory:
        memory = parse_memory(options.memory)
    else:
        memory = float(gpu.visible_gpus()[0].memory_bytes or 0)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        found = list(processes.map(count, options.pairs, [memory] * len(options.pairs)))
    lines = [tried(pair, counted) for pair, counted in zip(options.pairs, found, strict=True)]
    frame = pd.DataFrame(
        lines, columns=["case", "batch", "peak", "measured", "fits", "fails", "seconds"]
    )
    number = "{:.0f}".format
    columns: dict[str, Shown] = {
        "trainer and model": ("case", str),
        "largest batch,\ncounted": ("batch", number),
        "its peak,\nGB": ("peak", gigabytes),
        "measured": ("measured", gigabytes),
        "largest\nthat ran": ("fits", number),
        "out of\nmemory at": ("fails", number),
        "counted\nin s": ("seconds", number),
    }
    print(as_text([Table.of(f"{memory / 1e9:.1f} GB", frame, columns, [])], 100))
    return int(frame.fits.isna().any() or frame.fails.isna().any())


if __name__ == "__main__":
    sys.exit(main())
