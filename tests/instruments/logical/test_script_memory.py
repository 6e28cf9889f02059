"""Peak memory of a script or function: the tensors that live, and the lines that made them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpbench import observe
from dpbench.child.build import build
from dpbench.core.case import Case
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.logical.memory import ScriptMemory
from dpbench.instruments.observe import Observation

KB = 1024
CASE = Case(trainer="standard", batch_size=4, seq_len=32, model_size="tiny")


def alive() -> int:
    """The bytes that a count would begin with."""
    gc.collect()
    memory = ScriptMemory()
    memory.track_existing()
    return memory.now


def peaks(seen: Observation) -> dict[str, float]:
    return {r.phase: r.value for r in seen.outcome.rows if r.metric == "peak_memory_bytes"}


def lines(seen: Observation) -> dict[tuple[str, str], int]:
    """Bytes at the peak by phase and line, without the line's number."""
    held: dict[tuple[str, str], int] = {}
    for each in seen.outcome.memory_lines:
        file, colon, rest = each.line.partition(".py:")
        line = f"{file.rpartition('/')[2]}: {rest.partition(' ')[2]}" if colon else each.line
        held[each.phase, line] = held.get((each.phase, line), 0) + each.held_bytes
    return held


def before(what: str) -> tuple[str, str]:
    return "outside", f"{what} made before the counted steps"


@pytest.mark.repeats
@pytest.mark.parametrize("trainer", ["standard", "dpsgd", "dpsgd_ghost", "fused"])
def test_peak_of_running_steps_is_that_of_the_case_counted_without_data(trainer: str) -> None:
    """But for the two other batches of the case, which lie in its memory all the time."""
    case = resolve(replace(CASE, trainer=trainer))
    counted = [r for r in Logical().count(case).rows if r.metric == "peak_memory_bytes"]
    [of_case] = [row.value for row in counted if row.phase == "step"]
    others = alive()  # of other tests
    trained, batches = build(case, torch.device("cpu"), 3)
    with observe("logical", skip=2, steps=1) as seen:
        for batch in batches:
            with seen.step():
                trained.train_step(batch)
    tensors = [t for batch in batches[:2] for t in batch]
    idle = sum(-(-t.nbytes // 512) * 512 for t in tensors)
    assert peaks(seen)["step"] - others == of_case - idle
    assert sum(each.held_bytes for each in seen.outcome.memory_lines) == peaks(seen)["step"]


def test_parameters_state_and_gradients_that_came_before_are_counted_and_data_sets_are_not() -> (
    None
):
    others = alive()
    model = nn.Linear(128, 128, bias=False)  # 64 KB
    model.register_buffer("mean", torch.zeros(2 * KB))  # 8 KB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert alive() - others == (3 * 64 + 8) * KB
    data = torch.randn(4096, 128)
    with observe("logical", skip=0, steps=1) as seen, seen.step():
        batch = data[:8].clone()  # 4 KB
        model(batch).sum().backward()
        optimizer.step()
    assert lines(seen)[before("others")] == 4 * KB
    assert peaks(seen)["forward"] - others < 2 * (3 * 64 + 8) * KB < data.nbytes


def test_storage_counts_once_from_its_allocation_until_nothing_refers_to_it() -> None:
    model = nn.Linear(1, 1, bias=False)
    gc.collect()

    def views(made: torch.Tensor) -> torch.Tensor:
        return made.view(-1)[: made.numel() // 2].t().detach()  # of the same storage

    def peak(how: str) -> float:
        with observe("logical", skip=0, steps=1) as seen, seen.step():
            out = model(torch.ones(1, 1)).sum()
            kept = torch.ones(16 * KB // 4) + out.detach() if how != "none" else out
            if how == "views":
                kept = views(kept)
            if how == "freed":
                del kept
                kept = torch.ones(16 * KB // 4) * out.detach()
            if how == "grown":
                kept.resize_(64 * KB // 4)
            if how == "grown by its storage":
                kept.untyped_storage().resize_(64 * KB)
            out.backward()
        return peaks(seen)["step"]

    none, once = peak("none"), peak("once")
    assert once == peak("views") == peak("freed")
    assert 0 < once - none <= 33 * KB  # the ones, and their sum
    assert 64 * KB < peak("grown") - (none - KB) < 64 * KB + 4 * KB
    assert peak("grown by its storage") == peak("grown")


def test_line_and_phase_that_hold_most_are_named() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hidden(batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).relu()
        return out

    with observe("logical", skip=0, steps=1) as seen, seen.step():
        hidden(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
    held = lines(seen)
    assert held["forward", "test_script_memory: hidden"] == 512 * KB  # relu keeps its result alone
    phases = peaks(seen)
    assert max(phases, key=lambda phase: phases[phase]) in ("step", "backward")
    assert any("Backward0" in line for _, line in held)
