"""Measure by pytest-benchmark how long dpbench's own work takes.

From the checkout:

    pip install pytest-benchmark
    pytest -n 0 bench/speed.py
    pytest -n 0 bench/speed.py -k counting --benchmark-autosave --benchmark-compare

`test_a_script_of_1000_steps` starts a process. The other tests run commands in this process.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench import Case, Instrument, Measurement, Outcome, PendingMeasurement
from dpbench.commands.cli import main

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
KERNELS = ROOT / "tests/data/tiny-fp32/kernels/report_dpsgd_bs4_seq64.ncu-rep.xz"
PHASES = ("step", "forward", "backward", "clip", "noise", "optimizer")
METRICS = ("dram_read_bytes", "dram_write_bytes", "l2_sm_read_bytes", "l2_sm_write_bytes")

LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(1000):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

Benchmark = Callable[..., Any]


class Instant(Instrument):
    """An instrument that measures nothing, and returns as many rows as a real measurement."""

    name = "instant"

    def start(self, case: Case) -> PendingMeasurement:
        return Rows(case)


class Rows(PendingMeasurement):
    """A finished measurement with a row for each phase, metric and step, for three steps."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def outcome(self) -> Outcome:
        rows = (
            Measurement(self.case, "instant", phase, metric, 1e9, "B", step, "NVIDIA H200", "1")
            for phase in PHASES
            for metric in METRICS
            for step in range(3)
        )
        return Outcome(self.case, tuple(rows))


def command(*arguments: object) -> None:
    """Run a dpbench command in this process."""
    assert main([*map(str, arguments)]) == 0


def test_session_of_16_cases(benchmark: Benchmark, tmp_path: Path) -> None:
    """Time a session without its measurements: for example saving the run and writing files."""
    files = (f"--{kind}={tmp_path / f'run.{kind}'}" for kind in ("json", "markdown", "csv"))
    instant = ("--instrument", "bench.speed:Instant", "--grid", "grid1")
    benchmark(command, "run", *instant, *files, "--save", "it", "--storage", tmp_path)


def test_comparing_two_runs(benchmark: Benchmark) -> None:
    """Time loading and comparing two runs."""
    runs = (RESULTS / f"h200-cupti-grid1-{session}.json.xz" for session in (1, 2))
    benchmark(command, "compare", *runs)


@pytest.mark.parametrize("trainer", ["standard", "dpsgd", "dpsgd_ghost", "fused"])
def test_counting(benchmark: Benchmark, trainer: str) -> None:
    """Time counting a step of 1.34 B parameters."""
    cell = ("--batch-size", 8, "--seq-len", 256, "--trainer", trainer)
    benchmark(command, "run", "--instrument", "logical", *cell)


def test_reading_a_report_of_kernels(benchmark: Benchmark, tmp_path: Path) -> None:
    """Time ``dpbench show`` of a recorded ncu report, which NVIDIA's library reads."""
    report = tmp_path / KERNELS.stem
    report.write_bytes(lzma.decompress(KERNELS.read_bytes()))
    benchmark(command, "show", report)


@pytest.mark.parametrize("watched", [False, True])
def test_a_script_of_1000_steps(benchmark: Benchmark, watched: bool, tmp_path: Path) -> None:
    """Time a process that runs a training script, with and without ``dpbench exec``."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    under = ("-m", "dpbench", "exec", "--instrument", "timing", "--continue") if watched else ()
    run = [sys.executable, *under, str(script)]
    benchmark(subprocess.run, run, check=True, stdout=subprocess.DEVNULL)
