"""The plugin's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.case import AXES, GRIDS
from dpbench.instruments.kernel_choice import KERNEL_OPTIONS, SPEED_OPTIONS
from dpbench.instruments.ncu import Ncu
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler import TorchProfiler
from dpbench.plugin import comparing, saving
from dpbench.results.view import COLUMNS_HELP, GROUP_BY_HELP, SORT_HELP, TOP

FILES = {
    "json": "every row, and what follows from them,",
    "markdown": "the tables",
    "csv": "every row as CSV",
    "html": "a page of charts and tables (needs dpbench[report])",
    "github-benchmark": "the tables' columns for github-action-benchmark (customSmallerIsBetter)",
}
"""Files that a session can write, by the option that names them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; their defaults are the instruments' own."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    _add_ncu(group)
    _add_cases(group)
    _add_measuring(group)
    _add_output(group)
    _add_profile(group)
    saving.add_options(group)
    comparing.add_options(group)


def _add_ncu(group: pytest.OptionGroup) -> None:
    group.addoption("--ncu", action="store_true", help="measure cases under NVIDIA Nsight Compute")
    group.addoption("--ncu-path", metavar="PROGRAM", help="the ncu program, if not on PATH")
    group.addoption(
        "--ncu-dir",
        type=Path,
        default=Path("ncu_reports"),
        metavar="DIR",
        help="where .ncu-rep reports and logs go (default ncu_reports)",
    )
    group.addoption(
        "--ncu-metrics",
        action="append",
        metavar="NAMES",
        help="what to count: names of dpbench, of nvprof, or ncu counters, separated by commas "
        "(default: DRAM, L2 and global load/store bytes)",
    )
    for name, declared in KERNEL_OPTIONS.items():
        group.addoption(f"--ncu-{name}", **declared)
    for name, declared in SPEED_OPTIONS.items():
        group.addoption(f"--{name}", **declared)
    group.addoption(
        "--ncu-kernels-top",
        type=int,
        default=TOP,
        metavar="N",
        help="how many kernels a table shows (default %(default)d)",
    )


def _add_cases(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--dpbench-grid",
        default="grid1",
        metavar="GRID",
        help=f"cases of the dpbench_case fixture: {', '.join(GRIDS)}, or a .toml file "
        "(default grid1)",
    )
    for axis in AXES:
        group.addoption(
            f"--dpbench-{axis.replace('_', '-')}",
            action="append",
            type=int if axis in ("batch_size", "seq_len") else str,
            metavar=axis.upper(),
            help=f"replaces the grid's {axis.replace('_', ' ')}; repeatable",
        )


def _add_measuring(group: pytest.OptionGroup) -> None:
    for prefix, whose, steps in (
        ("ncu", "profiled", Ncu.steps),
        ("dpbench", "unprofiled", Timing.steps),
    ):
        for name, default in vars(steps).items():
            group.addoption(
                f"--{prefix}-{name}",
                type=int,
                default=default,
                metavar="N",
                help=f"{name} steps of the {whose} process (default {default})",
            )
    group.addoption(
        "--dpbench-no-timing",
        action="store_true",
        help="count bytes only: no second, unprofiled process for step time and peak memory",
    )
    group.addoption(
        "--dpbench-timeout",
        type=float,
        default=Timing.timeout,
        metavar="SECONDS",
        help="end a case's process after this long on the GPU (default %(default)g)",
    )
    group.addoption(
        "--dpbench-try-anyway",
        action="store_true",
        help="start cases whose predicted peak memory does not fit the GPU, instead of skipping",
    )


def _add_output(group: pytest.OptionGroup) -> None:
    group.addoption("--dpbench-columns", metavar="LABELS", help=COLUMNS_HELP)
    group.addoption("--dpbench-sort", metavar="COL", help=SORT_HELP)
    group.addoption("--dpbench-group-by", metavar="LABEL", help=GROUP_BY_HELP)
    for name, what in FILES.items():
        group.addoption(f"--dpbench-{name}", type=Path, metavar="FILE", help=f"write {what} here")


def _add_profile(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--dpbench-profile",
        action="store_true",
        help="run each measured case under the PyTorch profiler as well: time, memory and "
        "copies by phase, traces, tables, a TensorBoard log",
    )
    group.addoption(
        "--dpbench-profile-dir",
        type=Path,
        default=TorchProfiler.directory,
        metavar="DIR",
        help="where these go, one folder a case (default %(default)s)",
    )
    group.addoption(
        "--dpbench-profile-schedule",
        default=str(TorchProfiler.schedule),
        metavar="NAME=N,…",
        help="steps that it skips, waits, warms up, records, and how often (default %(default)s)",
    )
    group.addoption(
        "--dpbench-profile-threshold",
        type=float,
        default=TorchProfiler.threshold,
        metavar="MS",
        help="list operators with this many ms of a step or more (default %(default)g)",
    )
