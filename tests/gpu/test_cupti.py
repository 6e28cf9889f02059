"""Counters in this process on a real GPU: right by themselves, and by phase as in all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from dpbench.gpu import exclusive, visible_gpus
from dpbench.instruments.cupti.metrics import DRAM_BYTES, METRICS, resolve_metrics
from dpbench.instruments.cupti.steps import Counts, StepCounter, Target, count_ranges
from dpbench.results.rows import STEP
from dpbench.training.phases import observed_step, phase

pytestmark = pytest.mark.gpu

COPIED = 1 << 32
"""B: so much more than any L2 holds that what stays there is below one percent."""

COUNT = """
import torch
from dpbench import DpbenchError
from dpbench.instruments.cupti.steps import count_ranges
torch.ones(1, device="cuda")
try:
    with count_ranges():
        pass
except DpbenchError as error:
    print(type(error).__name__)
else:
    print("counted")
"""


@pytest.fixture(autouse=True)
def alone_on_the_gpu() -> Iterator[None]:
    with exclusive(visible_gpus()[0]):
        torch.ones(1, device="cuda")
        yield
        torch.cuda.empty_cache()


def test_a_copy_of_known_size_is_counted_within_one_percent_and_idle_near_zero() -> None:
    source = torch.ones(COPIED // 4, device="cuda")
    copy = torch.empty_like(source)
    with count_ranges() as counts:
        with phase("forward"):
            copy.copy_(source)
        with phase("backward"):
            time.sleep(0.1)
    for metric in DRAM_BYTES:
        assert counts.by_phase["forward"][metric] == pytest.approx(COPIED, rel=0.01)
        assert counts.by_phase["backward"][metric] < 0.01 * COPIED
    assert counts.share("gpu_busy_share", "forward") > 0.9
    assert counts.share("gpu_busy_share", "backward") < 0.01
    assert counts.by_phase["backward"]["range_time_seconds"] == pytest.approx(0.1, rel=0.1)


def count_training(*more: str) -> Counts:
    """A matrix product of 0.8 GB and its backward, on a thread of autograd's."""
    weights = torch.ones(8192, 8192, device="cuda", requires_grad=True)
    metrics = resolve_metrics([*METRICS, *more])
    with closing(StepCounter(metrics, Target.of_torch())) as counter:
        for _ in range(counter.steps):
            weights.grad = None
            with observed_step(counter):
                with phase("forward"):
                    loss = (weights @ weights).sum()
                with phase("backward"):
                    loss.backward()
        return counter.counts()


def test_phases_add_up_to_the_whole_step() -> None:
    by_phase = count_training().by_phase
    whole = by_phase.pop(STEP)
    for metric in ("global_load_bytes", "global_store_bytes"):
        assert sum(v[metric] for v in by_phase.values()) == pytest.approx(whole[metric], rel=0.001)
    phases = sum(values[metric] for values in by_phase.values() for metric in DRAM_BYTES)
    assert phases == pytest.approx(sum(whole[metric] for metric in DRAM_BYTES), rel=0.05)
    assert by_phase["backward"]["gpu_busy_cycles"] > by_phase["forward"]["gpu_busy_cycles"]


def test_metrics_of_several_passes_are_counted_in_as_many_steps() -> None:
    more = [f"lts__t_sectors_lookup_{what}.sum" for what in ("hit", "miss")]
    forward = count_training(*more).by_phase["forward"]
    assert all(forward[metric] > 0 for metric in (*more, "l2_total_bytes", "range_time_seconds"))


def test_a_second_process_that_counts_is_told_who_is_in_the_way() -> None:
    with count_ranges():
        other = subprocess.run(
            [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=120, check=True
        )
    assert other.stdout.split() == ["CountersBusy"]
