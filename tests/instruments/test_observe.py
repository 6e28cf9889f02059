"""Steps of one's own loop, by ``dpbench.observe``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from dpbench import observe
from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError
from dpbench.core.subject import Script
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.logical.recorder import NothingCounted
from dpbench.instruments.nsys.nsys import Nsys
from dpbench.instruments.observe import FunctionInstrument
from dpbench.results.run import Run
from dpbench.runner import measure


def step_of(*, private: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(32, 64)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if private:
        model = GradSampleModule(model)
        optimizer = DPOptimizer(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
        )
    data = torch.randn(4, 32)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("instrument", ["timing", "logical"])
def test_steps_that_count_are_in_the_report_by_phase(instrument: str) -> None:
    step = step_of(private=True)
    with observe(instrument, name="mine", skip=1, steps=2) as seen:
        for _ in range(5):
            with seen.step():
                step()
    report = seen.report
    metric = {"timing": "step_time_seconds", "logical": "logical_bytes"}[instrument]
    parts = ("forward", "backward", "clip", "noise", "optimizer")
    assert report.case.id == "mine"
    assert set(report.frame.repeat) == {0, 1}
    assert all(report.value(metric, phase) > 0 for phase in parts)
    assert report.value(metric) >= report.value(metric, "backward")


def test_logical_bytes_are_those_of_the_tensors_that_passed() -> None:
    weights = 4 * (32 * 64 + 64)
    reports = []
    for private in (False, True):
        step = step_of(private=private)
        with observe("logical", skip=1) as seen:
            for _ in range(3):
                with seen.step():
                    step()
        reports.append(seen.report)
    plain, private_ = reports
    assert plain.value("logical_read_bytes", "optimizer") == 2 * weights
    assert plain.value("logical_write_bytes", "optimizer") == weights
    assert private_.value("logical_read_bytes", "clip") >= 4 * weights  # a gradient an example
    assert private_.ratio_to(plain) > 3
    assert private_.ratio_to(plain, phase="forward") == 1
    calls = plain.operators.calls["forward", "aten.addmm"]
    assert calls == 1
    assert plain.notes[0] == "counted: operators of the CPU, and a GPU may run others"


def test_old_objects_are_left_alone_meanwhile_and_collected_again_afterwards() -> None:
    gc.unfreeze()  # what the suite froze
    try:
        with observe("logical") as seen, seen.step():
            torch.ones(3).clone()
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()


def test_phases_that_come_and_go_are_noted() -> None:
    step = step_of(private=False)
    with observe("logical") as seen:
        for accumulates in (True, True, False):
            with seen.step():
                torch.ones(3).clone()
                accumulates or step()
    [*_, backward, forward, optimizer] = seen.report.notes
    assert backward == "backward is present in 1 of 3 steps"
    assert forward == "forward is present in 1 of 3 steps"
    assert optimizer == "optimizer is present in 1 of 3 steps"


def test_sparse_gradients_are_named_as_not_counted() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe("logical") as seen, seen.step():
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert any(note.startswith("NOT COUNTED: aten.") for note in seen.report.notes)


def test_step_that_does_not_end_does_not_count() -> None:
    step = step_of(private=False)
    with observe("timing") as seen:
        with seen.step():
            step()
        with pytest.raises(KeyError), seen.step():
            raise KeyError("data")
    assert set(seen.report.frame.repeat) == {0}
    assert seen.report.notes == ("step 2 is not counted, because it raised KeyError",)


def test_report_without_a_step_says_what_is_missing() -> None:
    with observe("timing", skip=2) as seen, seen.step():
        pass
    with pytest.raises(ConfigurationError, match="no step was counted: put"):
        _ = seen.report


def test_steps_in_which_pytorch_did_nothing_are_no_zeros() -> None:
    with observe("logical", name="of-jax") as seen, seen.step():
        sum(range(10))
    with pytest.raises(NothingCounted, match="no PyTorch operator ran in 1 step"):
        _ = seen.report


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"instrument": "x"}, "choose from timing, ncu"),
        ({"instrument": "nsys"}, "nsys cannot measure a step: choose timing"),
        ({"instrument": Nsys("nsys")}, "nsys cannot measure a step: choose timing"),
        ({"steps": 0}, "but skip is 0 and steps is 0"),
        ({"skip": -1}, "but skip is -1 and steps is None"),
    ],
    ids=str,
)
def test_what_cannot_be_observed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), observe(**options):
        pass


def test_logical_counting_says_that_nothing_compiled_was_used() -> None:
    model = torch.compile(nn.Linear(32, 64), backend="eager")
    with observe("logical") as seen:
        for _ in range(2):
            model(torch.randn(4, 32)).sum().backward()
            with seen.step():
                model(torch.randn(4, 32)).sum().backward()
    assert "functions that use torch.compile ran uncompiled" in seen.outcome.notes
    assert "aten.addmm" in {operator.operator for operator in seen.outcome.operators}


def test_a_function_that_is_measured_has_lines_of_memory() -> None:
    function = FunctionInstrument(Logical(), step_of(private=True), Steps(1, 2))
    outcome = measure(Script("step"), [function])
    peaks = [row.value for row in outcome.rows if row.metric == "peak_memory_bytes"]
    assert sum(line.held_bytes for line in outcome.memory_lines) == max(peaks)
    assert any("test_observe.py" in line.line for line in outcome.memory_lines)
    saved = Run.of("run", [outcome]).document["memory_lines"]
    assert [line["line"] for line in saved] == [line.line for line in outcome.memory_lines]
