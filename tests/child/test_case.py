"""The measured process itself, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dpbench import Case, ConfigurationError
from dpbench.child.build import build, pick_device, set_tf32
from dpbench.child.case import PhaseTimes, held_by_graphs, run_case
from dpbench.instruments.timing import TimingRecorder
from dpbench.training.phases import observed_step, phase

CASE = Case("dpsgd_ghost", 4, 16, "tiny")
CPU = torch.device("cpu")


def timed(warmup: int, active: int) -> Mapping[str, Any]:
    recorder = TimingRecorder(active)
    return run_case(CASE, recorder, device="cpu", warmup=warmup, active=active).details


def test_warm_up_steps_are_not_observed() -> None:
    record = timed(2, 3)
    assert len(record["phase_seconds"]) == 3
    spent = record["spent_seconds"]
    assert [*spent] == ["waiting", "building", "warmup", "active", "after", "freeing"]
    assert spent["active"] >= sum(sum(step.values()) for step in record["phase_seconds"])


def test_the_same_case_trains_the_same_way_twice() -> None:
    """A profiler that needs several passes runs the process again and must find the same work."""
    losses = {timed(1, 1)["loss"] for _ in range(2)}
    assert len(losses) == 1


def test_batches_differ_from_step_to_step() -> None:
    _, batches = build(CASE, CPU, num_batches=2)
    assert not torch.equal(batches[0][0], batches[1][0])


def test_bf16_makes_every_parameter_bfloat16() -> None:
    trainer, _ = build(Case("dpsgd", 2, 8, "tiny", "bf16"), CPU, num_batches=1)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_sequences_longer_than_the_position_table_fit() -> None:
    trainer, batches = build(Case("standard", 1, 1500, "tiny"), CPU, num_batches=1)
    assert torch.isfinite(trainer.train_step(batches[0]))


def test_phase_times_belong_to_the_innermost_phase() -> None:
    times = PhaseTimes(CPU)
    with observed_step(times), phase("optimizer"):
        time.sleep(0.02)
        with phase("clip"):
            time.sleep(0.05)
    (seconds,) = times.seconds()
    assert seconds["clip"] >= 0.05
    assert seconds["optimizer"] >= 0.02
    assert seconds["clip"] > seconds["optimizer"]


def test_cuda_without_a_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto") == CPU
    with pytest.raises(ConfigurationError, match=r"no CUDA GPU.*--device cpu"):
        pick_device("cuda")


def test_memory_that_cuda_graphs_keep_counts_though_no_tensor_holds_it() -> None:
    def segment(
        pool: tuple[int, int], total: int, allocated: int, device: int = 0
    ) -> dict[str, Any]:
        return {
            "device": device,
            "address": 140_000_000_000,
            "total_size": total,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": allocated,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": pool,
            "is_expandable": False,
            "blocks": [],
        }

    ordinary = segment((0, 0), 20 << 20, 1 << 20)
    graphs = [segment((0, 1), 20 << 20, 5 << 20), segment((0, 2), 2 << 20, 2 << 20)]
    elsewhere = segment((0, 1), 20 << 20, 0, device=1)
    assert held_by_graphs([ordinary, *graphs, elsewhere], 0) == 15 << 20
    assert held_by_graphs([ordinary], 0) == 0


@pytest.mark.parametrize(("precision", "operations"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_a_precision_that_a_module_set_for_all_is_not_that_of_a_case(
    precision: str, operations: str
) -> None:
    backends: Any = torch.backends
    backends.fp32_precision = "tf32"
    try:
        set_tf32(Case("standard", 4, 16, "tiny", precision), torch.device("cuda"))
        for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            assert operation.fp32_precision == operations
    finally:
        backends.fp32_precision = "none"
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = False, True
