"""Logical counts of ordinary training loops that run on tensors with data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from dpbench.child.patches import watch
from dpbench.child.step_finder import StepFinder, Stop
from dpbench.core.subject import Script
from dpbench.instruments.logical.recorder import LogicalRecorder
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP
from tests.child.loops import several_in_a_row

B, IN, HIDDEN, CLASSES = 32, 64, 128, 4
FORWARD = 2 * B * (IN * HIDDEN + HIDDEN * CLASSES)


def counted(loop: Callable[[], object], steps: int = 3, skip: int = 2, go_on: bool = False) -> Any:
    """The outcome of steps of a loop, which ends after them or continues."""
    recorder = LogicalRecorder(steps)
    finder = StepFinder(recorder, skip=skip, go_on=go_on)
    watch(finder)
    try:
        loop()
    except Stop:
        pass
    finally:
        finder.close()
        recorder.close()
    assert finder.failure is None
    return recorder.outcome(Script("loop"))


def by_step(outcome: Outcome, phase: str = STEP, metric: str = "flops") -> list[float]:
    return [row.value for row in outcome.rows if (row.phase, row.metric) == (phase, metric)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def validating(
    guard: Callable[[], Any], ended: list[int], model: Any = None, **compiling: Any
) -> Callable[[], None]:
    """Validate after each of 12 updates, and print a line at the end."""

    def loop() -> None:
        trained = network()
        called = torch.compile(trained, **compiling) if compiling else trained
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        x, y = torch.randn(B, IN), torch.randint(CLASSES, (B,))
        for step in range(12):
            cross_entropy(called(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with guard():
                (called(x).argmax(1) == y).float().mean().item()
            ended.append(step)

    return loop


@pytest.mark.repeats
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("go_on", [False, True])
def test_validation_is_outside_and_no_forward_is_lost(
    guard: Callable[[], Any], go_on: bool
) -> None:
    ended: list[int] = []
    outcome = counted(validating(guard, ended), steps=5, go_on=go_on)
    assert by_step(outcome, "forward") == by_step(outcome, "outside") == [FORWARD] * 5
    assert len(set(by_step(outcome))) == 1
    assert (ended[-1] == 11) == go_on
    assert torch.ones(2).sum() == 2, "nothing is left of a dispatch mode"


def test_a_script_that_must_be_compiled_as_a_whole_is_counted_uncompiled() -> None:
    ended: list[int] = []
    loop = validating(torch.no_grad, ended, fullgraph=True, backend="eager")
    outcome = counted(loop, skip=0, go_on=True)
    assert by_step(outcome, "forward") == [FORWARD] * 3
    assert ended[-1] == 11


@pytest.mark.repeats
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 2), (3, 2)])
def test_an_iteration_is_a_step_however_often_its_optimizers_step(ours: int, theirs: int) -> None:
    layers = 6 * 8 + 8 * 3
    update = 2 * 4 * (2 * layers + 8 * 3)  # forward, weights, and what the second layer is given
    assert by_step(counted(several_in_a_row(ours, theirs))) == [(ours + theirs) * update] * 3


def test_clipping_of_gradients_by_func_is_not_forward() -> None:
    model = network()
    each = sum(parameter.numel() for parameter in model.parameters()) * 4  # bytes

    def loss(values: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, values, (x[None],)), y[None])

    def loop() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            x, y = torch.randn(B, IN), torch.randint(CLASSES, (B,))
            values = {name: each.detach() for name, each in model.named_parameters()}
            gradients = vmap(grad(loss), (None, 0, 0))(values, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            for name, parameter in model.named_parameters():
                factor = (1 / norms).clamp(max=1)
                parameter.grad = torch.einsum("b,b...->...", factor, gradients[name])
            optimizer.step()

    outcome = counted(loop)
    clipped = 2 * B * each  # the gradients of all examples, read for their norms and their sum
    assert min(by_step(outcome, "outside", "logical_read_bytes")) >= clipped
    assert max(by_step(outcome, "forward", "logical_read_bytes")) < clipped / 8
    assert by_step(outcome, "forward") == [FORWARD] * 3
