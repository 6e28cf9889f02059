"""Ranks on GPUs of one machine, over NCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from dpbench import TRAINERS, Case, CaseReport
from dpbench.child.build import build, pick_device
from dpbench.child.messages import Steps
from dpbench.core.errors import CaseTimedOut, ConfigurationError, InstrumentError
from dpbench.core.gpu import number_of_gpus, visible_gpus, visible_to_case
from dpbench.core.registry import resolve
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.cupti.ranges import RECEIVED, SENT, payload_of
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import Timing
from dpbench.launch.ranks import on_all_ranks
from dpbench.results.outcome import Outcome
from dpbench.training.base import TrainerBase
from dpbench.training.parallel import all_gather, gathered, rank_and_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(number_of_gpus() < 2, reason="there are fewer than two GPUs"),
]


@pytest.fixture(autouse=True)
def two_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a worker of xdist, which sees one GPU, those that its case of two has."""
    for name, value in visible_to_case(2).items():
        monkeypatch.setenv(name, value)


CASE = Case("standard", batch_size=8, seq_len=16, model_size="99x64x2x2", parallel="ddp", gpus=2)

WIDE = replace(CASE, model_size="99x512x1x2")
"""Has matrices that are reduced one by one, while others are summed up."""

SHARDED = {"standard", "dpsgd_ghost", "fused"}
"""Trainers that train under FSDP2."""


@dataclass(frozen=True)
class Asked(Timing):
    """Calls a function of this module in each rank, and takes no steps of the case."""

    function: str = ""

    def record_case(self, case: Case) -> Outcome:
        return Outcome(case, (), details=globals()[self.function](case))


def ask(
    function: Callable[[Case], dict[str, Any]], folder: Path, case: Case = CASE
) -> list[dict[str, Any]]:
    """What a function returns in each rank of a case."""
    asked = Asked(folder, timeout=120, function=function.__name__)
    ranks: list[dict[str, Any]] = asked.measure(case).details["ranks"]
    return ranks


APART = 1e-3
"""How far updates may be, because bounds on norms differ with the examples of a batch."""


def parameters(trainer: TrainerBase) -> Tensor:
    whole = [gathered(p.detach()).flatten().clone() for p in trainer.model.parameters()]
    return torch.cat(whole).double()


def trained(case: Case, *, alone: bool = False) -> tuple[Tensor, Tensor]:
    """Parameters before and after two steps without noise in which most gradients are clipped."""
    options = {"noise_multiplier": 0.0, "learning_rate": 1.0, "max_grad_norm": 0.5}
    trainer, batches = build(case, pick_device("cuda"), 2, alone=alone, **options)
    before = parameters(trainer)
    for batch in batches:
        trainer.train_step(batch)
    return before, parameters(trainer)


def distances_from_one_process(case: Case) -> dict[str, Any]:
    """How far the update of two steps is from that of the joint batch, by trainer and parallel."""
    far: dict[str, float] = {}
    for trainer in TRAINERS if case.model_size == CASE.model_size else ("dpsgd", "fused"):
        alone = replace(case, trainer=trainer, parallel="none", gpus=1)
        before, expected = trained(alone, alone=True)
        for parallel in ("ddp", "fsdp2"):
            try:
                start, found = trained(replace(case, trainer=trainer, parallel=parallel))
            except ConfigurationError:
                continue
            assert torch.equal(start, before)
            difference = (found - expected).norm() / (expected - before).norm()
            far[f"{trainer}@{parallel}"] = float(difference)
    return {"far": far}


def test_updates_over_ranks_are_those_of_one_process_with_the_joint_batch(tmp_path: Path) -> None:
    for rank in ask(distances_from_one_process, tmp_path):
        assert {f"{name}@ddp" for name in TRAINERS} <= rank["far"].keys()
        assert {f"{name}@fsdp2" for name in SHARDED} <= rank["far"].keys()
        assert {pair: far for pair, far in rank["far"].items() if not far < APART} == {}


def test_sums_that_are_reduced_while_others_are_computed_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    for rank in ask(distances_from_one_process, tmp_path, WIDE):
        assert {*rank["far"]} == {"dpsgd@ddp", "fused@ddp", "fused@fsdp2"}
        assert {pair: far for pair, far in rank["far"].items() if not far < APART} == {}


# --- what crosses NVLink -------------------------------------------------------------------------

LARGE = 1 << 26
"""B of a message."""


def crossed(case: Case) -> dict[str, Any]:
    """Bytes that this rank sent and received in twenty collectives of each kind, by NVML."""
    payload, why = payload_of(f"GPU-{torch.cuda.get_device_properties().uuid}")
    if why:
        return {"why": why}
    whole = torch.ones(LARGE // 4, device="cuda")
    part = whole.chunk(case.gpus)[rank_and_ranks()[0]].clone()
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
    }

    def crossed_so_far() -> dict[str, float]:
        torch.cuda.synchronize()
        all_gather("ended")  # without the GPU
        crossed = payload()
        all_gather("read")  # or the other rank might send already
        return crossed

    found: dict[str, Any] = {}
    for kind, collective in kinds.items():
        collective()
        before = crossed_so_far()
        for _ in range(20):
            collective()
        after = crossed_so_far()
        found[kind] = {name: (after[name] - before[name]) / 20 / LARGE for name in (SENT, RECEIVED)}
    return found


def test_collectives_send_what_their_algorithm_says(tmp_path: Path) -> None:
    """Of two ranks a rank sends half in a gather and in a reduction, and both in an all-reduce."""
    for rank in ask(crossed, tmp_path):
        if "why" in rank:
            pytest.skip(rank["why"])
        for kind, share in (("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5)):
            assert rank[kind] == {
                SENT: pytest.approx(share, rel=0.005),
                RECEIVED: pytest.approx(share, rel=0.005),
            }


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_case_sends_what_is_counted_for_it_and_in_the_same_phases(
    parallel: str, tmp_path: Path
) -> None:
    case = replace(CASE, model_size="4000x2048x2x16", parallel=parallel)
    instrument = Cupti(tmp_path, steps=Steps(1, 2), names=("dram_read_bytes",))
    report = CaseReport.of(case, instrument.measure(case).rows)
    if SENT not in report.phases:
        pytest.skip("NVML does not count what crosses NVLink")
    counted = CaseReport.of(case, Logical().count(case).rows)
    whole = counted.value("collective_bytes")
    assert report.value(SENT) == pytest.approx(whole, rel=0.01)
    for phase, sent in report.phases[SENT].items():
        expected = counted.value("collective_bytes", phase) if phase in counted.phases.index else 0
        assert sent == pytest.approx(expected, abs=0.01 * whole), phase


# --- ranks that start and fail -------------------------------------------------------------------


def devices(case: Case) -> dict[str, int]:
    return {"device": torch.cuda.current_device()}


def test_a_process_that_has_asked_for_cuda_can_start_ranks() -> None:
    assert torch.cuda.is_available()  # from then on no fork of it can use a GPU
    ranks = on_all_ranks(devices, CASE, "cuda")
    assert [rank["device"] for rank in ranks] == [0, 1]


def free_memory() -> list[int]:
    return [gpu.free_bytes or 0 for gpu in visible_gpus()]


@pytest.mark.parametrize(
    ("trainer", "timeout", "error", "words"),
    [
        ("Killed", 120, InstrumentError, "rank 1: killed by SIGKILL"),  # may wait for the other
        ("Waits", 25, CaseTimedOut, "rank 1 was in fail "),
    ],
)
def test_a_rank_that_dies_or_hangs_frees_both_gpus(
    trainer: str,
    timeout: int,
    error: type[InstrumentError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = free_memory()
    case = resolve(replace(CASE, trainer=f"tests.launch.failing_ranks:{trainer}"))
    with pytest.raises(error, match=words):
        Timing(tmp_path, steps=Steps(0, 1), timeout=timeout).measure(case)
    ended = time.monotonic() + 10  # the driver takes a moment
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # other workers use memory meanwhile
    while alone and min(n - b for n, b in zip(free_memory(), before, strict=True)) < -(1 << 26):
        assert time.monotonic() < ended, f"free before {before}, then {free_memory()}"
        time.sleep(0.1)
    report = CaseReport.of(CASE, Timing(tmp_path, steps=Steps(0, 1), timeout=60).measure(CASE).rows)
    assert report.value("step_time_seconds") > 0
