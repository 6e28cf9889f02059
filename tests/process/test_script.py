"""Steps and phases of loops that know nothing of us."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpbench.process.script import StepFinder, Stop
from dpbench.process.watched import watch
from dpbench.training.phases import phase

LETTERS = {
    "forward": "F",
    "backward": "B",
    "clip": "C",
    "noise": "N",
    "optimizer": "O",
    "outside": ".",
}


class Trace:
    """Writes down the phases of each step, one letter each time that one begins."""

    def __init__(self, wanted: int = 100) -> None:
        self.wanted = wanted
        self.steps: list[str] = []

    @property
    def finished(self) -> bool:
        return len(self.steps) >= self.wanted

    def start_step(self) -> None:
        self.heard = ""

    def switch(self, phase: str) -> None:
        if not self.heard.endswith(letter := LETTERS[phase]):
            self.heard += letter

    def close(self) -> None:
        pass

    forked = close

    def end_step(self) -> None:
        self.steps.append(self.heard.replace(".", ""))


def traced(loop: Callable[[], object], **options: Any) -> tuple[Trace, StepFinder]:
    trace = Trace(options.pop("wanted", 100))
    finder = StepFinder(trace, **options)
    watch(finder)
    try:
        loop()
    except Stop:
        pass
    finally:
        finder.close()
    return trace, finder


def batches(size: int = 4, steps: int = 3) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(size * steps, 6)), batch_size=size)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(model: Any, batch: Tensor) -> Any:
    return cross_entropy(model(batch), batch.argmax(1) % 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> float:
    model, loss = network(), torch.zeros(())
    optimizer = sgd(model)
    for (batch,) in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def without_a_loader() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(model, torch.randn(4, 6)).backward()
        optimizer.step()


def accumulating() -> None:
    model = network()
    optimizer = sgd(model)
    for number, (batch,) in enumerate(batches(steps=6)):
        loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipping_the_whole_gradient() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def two_optimizers() -> None:
    model = network()
    ours = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for (batch,) in batches():
        loss_of(model, batch).backward()
        for optimizer in ours:
            optimizer.step()


def adversaries() -> None:
    """Each in its turn: two steps a batch."""
    first, second = network(), network()
    ours = [(first, sgd(first)), (second, sgd(second))]
    for (batch,) in batches():
        for model, optimizer in ours:
            loss_of(model, batch).backward()
            optimizer.step()


def with_a_closure() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for (batch,) in batches():

        def closure(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def scaling() -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = sgd(model)
    for (batch,) in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def updating_in_backward() -> None:
    model = network()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    for (batch,) in batches():
        loss_of(model, batch).backward()


def evaluating() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(model, batch)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, batch: Tensor) -> Any:
        return checkpoint(self.inner, batch, use_reentrant=True)


def checkpointing() -> None:
    model = Recomputing()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch.requires_grad_()).backward()
        optimizer.step()


def penalising_gradients() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss = loss_of(model, batch.requires_grad_())
        [slope] = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()


def private(max_grad_norm: Any = 1.0, **how: Any) -> Callable[[], None]:
    def loop() -> None:
        model = network()
        criterion: Any = nn.CrossEntropyLoss()
        found = PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=batches(),
            criterion=criterion,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
            **how,
        )
        wrapped, optimizer = found[0], found[1]
        if len(found) == 4:
            criterion = found[2]
        for (batch,) in found[-1]:
            optimizer.zero_grad()
            criterion(wrapped(batch), batch.argmax(1) % 3).backward()
            optimizer.step()

    return loop


class RecomputingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def updating_in_backward_of_what_is_computed_again() -> None:
    model = RecomputingLayers()
    for layer in model.layers:
        optimizer = sgd(layer)
        weight = next(layer.parameters())
        weight.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for (batch,) in batches():
        model(batch.requires_grad_()).square().mean().backward()


def in_physical_batches() -> None:
    model = network()
    wrapped, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=batches(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as memory:
        for (batch,) in memory:
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            optimizer.step()


LOOPS: list[tuple[Callable[[], object], list[str]]] = [
    (plain, ["OFBO"] * 3),
    (without_a_loader, ["FBO"] * 3),
    (accumulating, ["FBFBOO"] * 3),
    (clipping_the_whole_gradient, ["FBCO"] * 3),
    (two_optimizers, ["FBOOOO"] * 3),
    (adversaries, ["FBO"] * 6),
    (with_a_closure, ["OFOBOFOBO"] * 3),
    (scaling, ["FBOO"] * 3),
    (updating_in_backward, ["FBOBOBOBOB"] * 3),
    (updating_in_backward_of_what_is_computed_again, ["FBOBOBOB"] * 3),
    (evaluating, ["FBO"] * 3),
    (checkpointing, ["FBO"] * 3),
    (penalising_gradients, ["FBFBO"] * 3),
    (private(), ["OFBOCONONO"] * 3),  # adds noise, and then scales
    (private(grad_sample_mode="ew"), ["OFBOCONONO"] * 3),
    (private(grad_sample_mode="functorch"), ["OFBOCONONO"] * 3),
    (private(grad_sample_mode="ghost"), ["OFBOBCBOCONONO"] * 3),  # zeroes gradients in between
    (private(clipping="per_layer", max_grad_norm=[1.0] * 4), ["OFBOCONONO"] * 3),
    (in_physical_batches, ["OFBOCOOFBOCONONO"] * 3),
]
"""Loops, and the phases of each of their steps without what is outside of all."""


def name_of(value: object) -> str | None:
    return getattr(value, "__qualname__", None)


@pytest.mark.parametrize(("loop", "steps"), LOOPS, ids=name_of)
@pytest.mark.filterwarnings("ignore")
def test_steps_and_phases_are_those_of_the_loop(
    loop: Callable[[], object], steps: list[str]
) -> None:
    trace, finder = traced(loop)
    assert trace.steps == steps
    assert (finder.failure, finder.notes, finder.steps) == (None, [], len(steps))
    after_two, finder = traced(loop, skip=2)  # which are found without their phases
    assert (after_two.steps, finder.steps) == (steps[2:], len(steps))


def test_book_keeping_clips_within_backward_and_adds_noise_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fastDP is in no package index, so its two functions are put in place of it."""
    (tmp_path / "fastDP").mkdir()
    for name, text in (
        ("__init__", ""),
        ("autograd_grad_sample", "def _per_block_clip_grad(*_): pass\n"),
        ("privacy_engine", "class PrivacyEngine:\n def _create_noisy_clipped_gradient(self): pass"),
    ):
        (tmp_path / "fastDP" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def loop() -> None:
        hooks = importlib.import_module("fastDP.autograd_grad_sample")
        engine = importlib.import_module("fastDP.privacy_engine").PrivacyEngine()
        model = network()
        optimizer = sgd(model)
        next(model.parameters()).register_hook(lambda _: hooks._per_block_clip_grad())
        for (batch,) in batches():
            loss_of(model, batch).backward()
            engine._create_noisy_clipped_gradient()
            optimizer.step()

    found, finder = traced(loop)
    assert (found.steps, finder.notes) == (["FBCBNO"] * 3, [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastDP"]:
        monkeypatch.delitem(sys.modules, name)


def test_loop_is_ended_where_the_step_after_those_that_count_would_begin() -> None:
    began = []

    def loop() -> None:
        model = network()
        optimizer = sgd(model)
        for number, (batch,) in enumerate(batches(steps=9)):
            began.append(number)
            loss_of(model, batch).backward()
            optimizer.step()

    trace, finder = traced(loop, skip=2, wanted=3)
    assert (trace.steps, finder.steps, began) == (["FBO"] * 3, 5, [0, 1, 2, 3, 4])


def test_loop_may_go_on_unwatched() -> None:
    call = nn.Module.__call__
    trace, finder = traced(plain, wanted=1, go_on=True)
    assert (trace.steps, finder.steps) == (["OFBO"], 1)
    assert nn.Module.__call__ is call


def test_what_was_put_around_functions_is_taken_away_again() -> None:
    places: list[tuple[Any, str]] = [
        (nn.Module, "__call__"),
        (Tensor, "backward"),
        (torch.autograd, "grad"),
        (nn.utils, "clip_grad_norm_"),
        (torch.optim.Optimizer, "zero_grad"),
    ]
    before = [vars(owner)[name] for owner, name in places]
    finders = [*sys.meta_path]
    traced(private())
    assert [vars(owner)[name] for owner, name in places] == before
    assert sys.meta_path == finders


def test_loop_comes_to_the_same_result() -> None:
    seen: list[float] = []
    alone = plain()
    traced(lambda: seen.append(plain()))
    assert seen == [alone]


def test_loop_that_catches_everything_is_left_alone_in_the_end() -> None:
    def loop() -> None:
        model = network()
        optimizer = sgd(model)
        for _ in range(50):
            try:
                loss_of(model, torch.randn(4, 6)).backward()
                optimizer.step()
            except SystemExit:
                pass

    trace, _ = traced(loop, wanted=2)
    assert trace.steps == ["FBO"] * 2


def test_own_marks_are_heard_with_what_is_found_inside() -> None:
    def loop() -> None:
        model = network()
        optimizer = sgd(model)
        for (batch,) in batches():
            with phase("forward"):
                loss = loss_of(model, batch)
            with phase("clip"):
                loss.backward()
            optimizer.step()

    trace, _ = traced(loop)
    assert trace.steps == ["FCBCO"] * 3


def test_training_in_a_thread_is_noticed() -> None:
    def loop() -> None:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()

    trace, finder = traced(loop)
    assert (trace.steps, finder.steps_elsewhere) == ([], 3)


def test_error_of_a_recorder_ends_the_loop_and_is_not_the_loops() -> None:
    class Broken(Trace):
        def switch(self, phase: str) -> None:
            raise RuntimeError("no counters")

    finder = StepFinder(Broken())
    watch(finder)
    with pytest.raises(Stop):
        plain()
    finder.close()
    assert repr(finder.failure) == "RuntimeError('no counters')"
    assert finder.steps == 1


def test_unfinished_step_is_not_heard_to_end() -> None:
    def loop() -> None:
        model = network()
        optimizer = sgd(model)
        for number, (batch,) in enumerate(batches()):
            loss = loss_of(model, batch)
            if number == 2:
                return
            loss.backward()
            optimizer.step()

    assert traced(loop)[0].steps == ["FBO"] * 2
