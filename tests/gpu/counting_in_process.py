"""Counters in this process on a real GPU: right by themselves, and by phase as in all.

`test_cupti.py` runs these in a process of their own: a worker may have used the GPU in other ways.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch

from dpbench import count_ranges
from dpbench.instruments.counters import ALWAYS
from dpbench.instruments.cupti.ranges import ByPhase, StepCounter, Target
from dpbench.results.rows import STEP
from dpbench.training.phases import observed_step, phase

pytestmark = pytest.mark.gpu

COPIED = 1 << 32
"""B: so much more than any L2 holds that what stays there is below one percent."""

COUNT = """
import torch
from dpbench import DpbenchError, count_ranges
torch.ones(1, device="cuda")
try:
    with count_ranges():
        pass
except DpbenchError as error:
    print(type(error).__name__)
else:
    print("counted")
"""


@pytest.fixture
def alone_on_the_gpu(alone_on_the_gpu: None) -> None:
    """Begin with a context on the GPU."""
    torch.ones(1, device="cuda")


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_a_copy_of_known_size_is_counted_within_one_percent_and_idle_near_zero() -> None:
    source = torch.ones(COPIED // 4, device="cuda")
    copy = torch.empty_like(source).copy_(source)  # the first launch loads the kernel
    with count_ranges(["l2_sm_read_bytes", "l2_sm_write_bytes"]) as counts:
        with phase("forward"):
            copy.copy_(source)
        with phase("backward"):
            time.sleep(0.1)
    for metric in ALWAYS:
        assert counts["forward"][metric] == pytest.approx(COPIED, rel=0.01)
        assert counts["backward"][metric] < 0.01 * COPIED
    for metric in ("l2_sm_read_bytes", "l2_sm_write_bytes"):
        assert counts["forward"][metric] == pytest.approx(COPIED, rel=0.01)
    busy, idle = counts["forward"], counts["backward"]
    assert busy["gpu_busy_share"] > idle["gpu_busy_share"]
    assert busy["range_time_seconds"] < idle["range_time_seconds"]


def count_training(names: list[str] | None = None) -> list[ByPhase]:
    """Squares of 1 GB, which move the same bytes in each step, and their backward."""
    weights = torch.ones(1 << 28, device="cuda", requires_grad=True)
    (weights * weights).sum().backward()  # the first launches load the kernels
    target = Target.of_torch()
    with closing(StepCounter(names, target)) as counter:
        expected = 2 if target.peers else 1  # links need a pass of their own
        assert names is not None or counter.passes == expected or counter.chip.name != "GH100"
        for _ in range(counter.steps):
            weights.grad = None
            with observed_step(counter):
                with phase("forward"):
                    loss = (weights * weights).sum()
                with phase("backward"):
                    loss.backward()
        return counter.rounds()


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_phases_add_up_to_the_whole_step() -> None:
    by_phase, all_in_one = count_training()
    whole = all_in_one[STEP]
    for metric in ("global_load_bytes", "global_store_bytes"):
        assert sum(v[metric] for v in by_phase.values()) == pytest.approx(whole[metric], rel=0.001)
    phases = sum(values[metric] for values in by_phase.values() for metric in ALWAYS)
    assert phases == pytest.approx(sum(whole[metric] for metric in ALWAYS), rel=0.05)
    assert by_phase["backward"]["gpu_busy_cycles"] > by_phase["forward"]["gpu_busy_cycles"]


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_metrics_of_several_passes_are_counted_in_as_many_steps() -> None:
    more = ["lts__t_bytes.sum", *(f"lts__t_sectors_lookup_{what}.sum" for what in ("hit", "miss"))]
    forward = count_training(more)[0]["forward"]
    assert all(forward[metric] > 0 for metric in (*more, "range_time_seconds"))


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_a_copy_to_another_gpu_is_counted_on_its_way() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    source = torch.ones(COPIED // 4, device="cuda:0")
    copy = torch.empty_like(source, device="cuda:1")
    with closing(StepCounter(None, Target.of_torch(), [True])) as counter:
        for _ in range(counter.steps):
            with observed_step(counter), phase("forward"):
                copy.copy_(source)
    [by_phase] = counter.rounds()
    sent = by_phase["forward"]
    # With the headers of packets in it; without NVLink there is no such row, and no zero.
    assert max(sent.get("nvlink_sent_bytes", 0), sent["pcie_write_bytes"]) == pytest.approx(
        1.065 * COPIED, rel=0.02
    )


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_copies_from_and_to_the_host_are_counted_with_the_headers_of_their_packets() -> None:
    on_host = torch.ones(1 << 26).pin_memory()
    on_gpu = torch.empty_like(on_host, device="cuda")
    names = ["pcie_read_bytes", "pcie_write_bytes"]
    with closing(StepCounter(names, Target.of_torch(), [True])) as counter:
        for _ in range(counter.steps):
            with observed_step(counter):
                with phase("forward"):
                    on_gpu.copy_(on_host, non_blocking=True)
                with phase("backward"):
                    on_host.copy_(on_gpu, non_blocking=True)
    [by_phase] = counter.rounds()
    assert by_phase["forward"]["pcie_read_bytes"] == pytest.approx(1.05 * (1 << 28), rel=0.05)
    assert by_phase["backward"]["pcie_write_bytes"] == pytest.approx(1.05 * (1 << 28), rel=0.05)


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_a_second_process_that_counts_is_told_who_is_in_the_way() -> None:
    with count_ranges():
        other = subprocess.run(
            [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=120, check=True
        )
    assert other.stdout.split() == ["CountersBusy"]
