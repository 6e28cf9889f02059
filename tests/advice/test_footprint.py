"""What is extrapolated over layers and batch sizes equals what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.advice.footprint import DEPTHS, Count, Counts, Footprint, footprints
from dpbench.core.case import Case
from dpbench.core.errors import CaseRefused
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical.logical import Logical
from tests.named import target
from tests.workloads import digits

DEEP = "128x128x6x2"
"""Each tensor of this model fills whole blocks of the allocator."""
AXES: list[dict[str, Any]] = [
    {"batch_size": 1},
    {"precision": "bf16", "optimizer": "adamw", "trainable": "lora:2", "seq_len": 32},
    {"micro_batches": 2, "activation_checkpointing": "on"},
]
CASES = [
    *((name, {}) for name in TRAINERS),
    *((name, axes) for name in ("dpsgd_ghost", "fused") for axes in AXES),
]


def footprint(case: Case) -> Footprint:
    [(_, found)] = footprints([case])
    assert isinstance(found, Footprint)
    return found


def of_step(case: Case) -> dict[str, float]:
    """A step counted at its full depth."""
    outcome = Logical().count(case)
    rows = {row.metric: row.value for row in outcome.rows if row.phase == "step"}
    return rows | {"launches": sum(each.calls for each in outcome.operators)}


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "axes"), CASES, ids=str)
def test_all_layers_are_known_from_few(trainer: str, axes: dict[str, Any]) -> None:
    """Bytes, operations and launches are linear in layers; the peak, also of a larger batch, nearly
    so."""
    usual: dict[str, Any] = {"batch_size": 4, "seq_len": 16, "model_size": DEEP}
    case = Case(trainer, **usual | axes)
    found = footprint(case)
    assert {count.layers for count in found.counts} == {*DEPTHS}
    total = found.totals(
        lambda phase, operator, read, written, flops, *_: {
            "logical_read_bytes": read,
            "logical_write_bytes": written,
            "flops": flops,
            "launches": 1,
        }
    )
    counted = of_step(case)
    assert total == {name: counted[name] for name in total}
    for batch_size in (case.batch_size, 40):
        whole = of_step(replace(case, batch_size=batch_size))["peak_memory_bytes"]
        peak, phase = found.peak(batch_size)
        # In so narrow a model, fast gradient clipping's peak is inside a layer, not at an end.
        near = 0.3 if trainer == "dpsgd_fgc" else 0.1
        assert peak == pytest.approx(whole, rel=near), phase


@pytest.mark.parametrize(
    "axes",
    [
        {"model_size": "100x32x3x2"},
        {"trainable": "*2*", "model_size": DEEP},
        {"parallel": "ddp", "gpus": 2, "model_size": DEEP},
    ],
    ids=str,
)
def test_a_model_whose_layers_are_few_or_differ_is_counted_whole(axes: dict[str, Any]) -> None:
    case = Case("standard", 4, 16, **axes)
    found = footprint(case)
    assert {count.layers for count in found.counts} == {0}
    assert found.peak(4)[0] == of_step(case)["peak_memory_bytes"]


@pytest.mark.slow
def test_a_workload_of_ones_own_is_counted() -> None:
    case = Case("dpsgd", 4, workload=target(digits.Digits))
    assert footprint(case).peak(8)[0] >= footprint(case).peak(4)[0] > 0


def test_why_a_case_cannot_be_counted_is_returned_and_others_are_counted() -> None:
    cases = [Case(name, 4, 8, model_size="9x16x1x2") for name in ("dpsgd", "dpsgd_ghost")]
    refused = Case("dpsgd", 4, 8, model_size="9x16x1x2", parallel="fsdp2", gpus=2)
    found = dict(footprints([refused, *cases]))
    assert isinstance(found[refused], CaseRefused)
    assert "does not train under parallel=fsdp2" in str(found[refused])
    assert all(isinstance(found[case], Footprint) for case in cases)


def made(live: dict[int, int]) -> Footprint:
    """Live bytes by batch size."""
    counts = [
        Count(size, 0, [], [("clip", "aten.add", *3 * [most])], 0, 0, False, {})
        for size, most in live.items()
    ]
    return Footprint(Case("dpsgd", next(iter(live)), 8), counts)


@pytest.mark.slow
def test_an_example_alone_is_no_measure_of_larger_batches() -> None:
    assert made({1: 7, 2: 20, 3: 30}).peak(1) == (7, "clip")
    assert made({1: 7, 2: 20, 3: 30}).peak(5) == (50, "clip")
    assert {step.batch_size for step in footprint(Case("dpsgd", 1, 8, model_size=DEEP)).counts} == {
        *(1, 2, 3)
    }


def test_a_trainer_says_whether_its_steps_are_graphs() -> None:
    case = Case("fused", 2, 8, model_size="9x16x1x2")
    assert Counts().of_step(case, 0).in_graphs
    assert not Counts().of_step(case.with_trainer("dpsgd"), 0).in_graphs
