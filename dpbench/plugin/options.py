"""The plugin's options: those that the commands have too, and pytest's own."""

from __future__ import annotations

import pytest

from dpbench import options as shared
from dpbench.instruments.settings import InstrumentSettings

PREFIX = "dpbench-"
"""What options begin with, so that they meet no other plugin's; those about ncu with ``ncu-``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; their defaults are the instruments' own."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    add = group.addoption
    add("--ncu", action="store_true", help="measure cases under NVIDIA Nsight Compute")
    shared.add_ncu(add)
    shared.add_counting(add, kernels="ncu-")
    shared.add_top(add, "ncu-kernels-")
    shared.add_grid(add, PREFIX)
    shared.add_axes(add, PREFIX)
    shared.add_steps(add, "the profiled", InstrumentSettings.ncu_steps, "ncu-")
    shared.add_steps(add, "the unprofiled", InstrumentSettings.timing_steps, PREFIX)
    add(
        "--dpbench-no-timing",
        action="store_true",
        help="count bytes only: no second, unprofiled process for step time and peak memory",
    )
    shared.add_timeout(add, PREFIX)
    shared.add_try_anyway(add, PREFIX)
    shared.add_view(add, PREFIX)
    shared.add_files(add, shared.FILES, PREFIX)
    add(
        "--dpbench-profile",
        action="store_true",
        help="run each measured case under the PyTorch profiler as well: time, memory and "
        "copies by phase, traces, tables, a TensorBoard log",
    )
    shared.add_profile_directory(add, PREFIX)
    shared.add_profile(add, PREFIX)
    shared.add_saving(add, PREFIX)
    shared.add_storage(add, PREFIX)
    shared.add_comparing(add, "fail a test if what it measured got worse", PREFIX)
    shared.add_across(add, "--dpbench-compare-across")
    for name, what in (
        ("", "rewrite in the file of --dpbench-compare=FILE what was measured, and nothing else"),
        ("-new-only", "add to the file of --dpbench-compare=FILE what it lacks"),
    ):
        add(f"--dpbench-update{name}", action="store_true", help=what)
