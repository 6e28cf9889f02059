"""What is extrapolated over batch sizes equals what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.advice.footprint import (
    RESERVED,
    Count,
    Counts,
    Footprint,
    equal_layers,
    footprints,
    largest_batch,
    needed,
    steps_of,
)
from dpbench.core.case import Case
from dpbench.core.errors import CaseRefused
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical.logical import Logical
from dpbench.launch.processes import ProcessGroup
from tests.launch import misbehaving
from tests.named import target
from tests.workloads import digits


def footprint(case: Case) -> Footprint:
    [(_, found)] = footprints([case])
    assert isinstance(found, Footprint)
    return found


def of_step(case: Case) -> dict[str, float]:
    """A step as the instrument counts it."""
    outcome = Logical().count(case)
    rows = {row.metric: row.value for row in outcome.rows if row.phase == "step"}
    return rows | {"launches": sum(each.calls for each in outcome.operators)}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("trainer", "axes"),
    [
        ("fused", {"micro_batches": 2, "activation_checkpointing": "on"}),
        pytest.param("dpsgd_ghost", {"parallel": "ddp", "gpus": 2}, marks=SLOW),
        *(pytest.param(name, {}, marks=SLOW) for name in TRAINERS),
    ],
    ids=str,
)
def test_a_step_is_known_at_its_batch_size_and_its_memory_at_larger_ones(
    trainer: str, axes: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"batch_size": 4, "seq_len": 16, "model_size": "128x128x1x2"}
    case = Case(trainer, **usual | axes)
    found = footprint(case)
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
    assert found.peak(4) == counted["peak_memory_bytes"]
    whole = of_step(replace(case, batch_size=40))["peak_memory_bytes"]
    assert found.peak(40) == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("trainer", ["fused", *(pytest.param(n, marks=SLOW) for n in TRAINERS)])
def test_equal_layers_are_counted_once_and_none_is_lost(trainer: str) -> None:
    case = Case(trainer, 4, 16, model_size="128x64x6x2", optimizer="adamw")
    whole = Footprint(case, [Counts().of_step(each) for each in steps_of(case)])
    few = Footprint(case, [Counts().of_layers(each, equal_layers(case)) for each in steps_of(case)])

    def of_call(phase: str, operator: str, read: int, written: int, flops: int, *_: Any) -> Any:
        return {"read": read, phase: written, "flops": flops, operator: 1}

    assert few.totals(of_call) == pytest.approx(whole.totals(of_call))
    # The peak of fast gradient clipping is between layers, not at an operator's first or last call.
    most = 0.25 if trainer == "dpsgd_fgc" else 0.1
    for size in (4, 40):
        assert few.peak(size) == pytest.approx(whole.peak(size), rel=most)


def test_layers_are_equal_if_nothing_tells_them_apart() -> None:
    case = Case("fused", 4, 16, model_size="128x64x6x2")
    assert equal_layers(case) == 6
    assert equal_layers(replace(case, trainable="lora:16")) == 6
    for other in ({"trainable": "blocks.3.*"}, {"gpus": 2, "parallel": "ddp"}):
        assert equal_layers(replace(case, **other)) == 0
    assert equal_layers(Case("fused", 4, workload="resnet")) == 0


@pytest.mark.slow
def test_a_workload_of_ones_own_is_counted() -> None:
    case = Case("dpsgd", 4, workload=target(digits.Digits))
    assert footprint(case).peak(8) >= footprint(case).peak(4) > 0


@pytest.mark.slow
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
        Count(size, [], [("clip", "aten.add", most)], 0, False) for size, most in live.items()
    ]
    return Footprint(Case("dpsgd", next(iter(live)), 8), counts)


@pytest.mark.slow
def test_an_example_alone_is_no_measure_of_larger_batches() -> None:
    assert made({1: 7, 2: 20, 3: 30}).peak(1) == 7
    assert made({1: 7, 2: 20, 3: 30}).peak(5) == 50
    assert {
        step.batch_size for step in footprint(Case("dpsgd", 1, 8, model_size="9x16x1x2")).counts
    } == {*(1, 2, 3)}


def test_a_trainer_says_whether_its_steps_are_graphs() -> None:
    case = Case("fused", 2, 8, model_size="9x16x1x2")
    assert Counts().of_step(case).in_graphs
    assert not Counts().of_step(case.with_trainer("dpsgd")).in_graphs


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not_when_they_are_counted() -> None:
    """Also where the peak is no line over the batch size, as of windows of convolutions."""
    case = Case("fused", 2, workload="resnet:depth=18,image_size=32,classes=9")
    memory = RESERVED + 0.6e9
    [(_, found)] = footprints([case], memory)
    assert isinstance(found, Footprint)
    size = largest_batch(found, memory)
    fits, next_one = (
        needed(Footprint(each, [Counts().of_step(each)]), each.batch_size)
        for each in (replace(case, batch_size=n) for n in (size, size + 1))
    )
    assert fits <= memory < next_one


def test_closing_ends_those_that_are_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessGroup] = []
    begin = ProcessGroup.__init__

    def keep(group: ProcessGroup, *arguments: Any, **options: Any) -> None:
        started.append(group)
        begin(group, *arguments, **options)

    monkeypatch.setattr(ProcessGroup, "__init__", keep)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    hangs = f"{misbehaving.Hangs.__module__}:Hangs"
    cases = Case("standard", 4, 16, "200x32x1x2"), Case(hangs, 4, 16, "200x32x1x2")
    found = footprints(cases)
    assert next(found)[0] is cases[0]
    assert started[1].process.poll() is None
    found.close()
    assert all(group.process.poll() is not None for group in started)
