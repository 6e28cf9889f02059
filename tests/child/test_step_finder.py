"""Steps and phases of loops that know nothing of us."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dpbench.child.patches import _AfterImport, watch
from dpbench.child.recorder import Calls
from dpbench.child.step_finder import MOST_TURNS, StepFinder, Stop
from dpbench.training.phases import phase
from tests.child.loops import (
    LOOPS,
    acting,
    batches,
    both_and_one_again,
    critic_more_often,
    loss_of,
    network,
    one_stage_after_the_other,
    plain,
    private,
    scaling,
    several_in_a_row,
    sgd,
)

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

    calls = Calls()

    def __init__(self, wanted: int = 100) -> None:
        self.wanted = wanted
        self.steps: list[str] = []

    @property
    def finished(self) -> bool:
        return len(self.steps) >= self.wanted

    def start_step(self) -> None:
        self.observed = ""

    def switch(self, phase: str) -> None:
        if not self.observed.endswith(letter := LETTERS[phase]):
            self.observed += letter

    def forked(self) -> None:
        pass

    def compiler(self, eval_frame: object) -> None:
        pass

    def end_step(self) -> None:
        self.steps.append(self.observed.replace(".", ""))


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


def compiling(what: str) -> tuple[list[float], list[int]]:
    """The losses, and how many operators each graph has that Dynamo found."""
    losses: list[float] = []
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    if what == "module":
        model.compile(backend=backend)
    optimizer = sgd(model)

    def loss_and_clip(batch: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss_of(model, batch)

    if what == "function":
        loss_and_clip = torch.compile(loss_and_clip, backend=backend)
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_and_clip(torch.randn(4, 6))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, graphs


@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.filterwarnings("ignore")
def test_what_dynamo_compiles_is_the_same(what: str) -> None:
    seen: list[object] = []
    alone = compiling(what)
    traced(lambda: seen.append(compiling(what)))
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


def test_training_in_a_thread_is_not_watched() -> None:
    def loop() -> None:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()

    trace, _ = traced(loop)
    assert trace.steps == []


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


def test_calls_without_gradients_are_heard_in_the_step_that_they_come_before() -> None:
    called = Counter[str]()

    class Heard(Trace):
        def switch(self, phase: str) -> None:
            self.phase = phase

        def end_step(self) -> None:
            self.steps.append("")

    def loop() -> None:
        with mock.patch.object(nn.Linear, "forward", forward):
            acting()

    def forward(layer: nn.Linear, batch: Tensor) -> Tensor:
        called[trace.phase] += 1
        return nn.functional.linear(batch, layer.weight, layer.bias)

    trace = Heard()
    trace.phase = "outside"
    finder = StepFinder(trace)
    watch(finder)
    loop()
    finder.close()
    assert called == {"outside": 3 * 20 * 2, "forward": 3 * 2}


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_a_scaler_skips_are_named_and_end_steps(fused: bool) -> None:
    trace, finder = traced(lambda: scaling(overflows=2, fused=fused))
    assert trace.steps == ["FBOOO"] * 3
    assert [*finder.remarks()] == [
        "GradScaler skipped 2 updates in counted steps because gradients were inf or nan, so the "
        "work of these updates is missing"
    ]


def test_round_of_turns_is_said_to_be_the_step() -> None:
    _, finder = traced(critic_more_often)
    assert [*finder.remarks()] == [
        "optimizers take turns: a counted step contains at most 4 of their turns"
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (1, 9), (5, 6)]
)
def test_iteration_lies_between_updates_of_the_optimizer_that_stepped_first(
    ours: int, theirs: int
) -> None:
    trace, finder = traced(several_in_a_row(ours, theirs), skip=2)
    assert (trace.steps, finder.steps) == (["FBO" * (ours + theirs)] * 4, 6)
    assert (finder.failure, finder.notes) == (None, [])
    turns = ours + theirs
    assert [*finder.remarks()] == [
        f"optimizers take turns: a counted step contains at most {turns} of their turns"
    ]


def test_iteration_may_begin_with_an_update_of_several_optimizers_at_once() -> None:
    trace, finder = traced(both_and_one_again, skip=2)
    assert (trace.steps, finder.failure) == (["FBOOFBOFBO"] * 4, None)


@pytest.mark.parametrize("skip", [0, 1])
def test_where_an_iteration_ends_is_not_guessed_before_one_was_seen(skip: int) -> None:
    """The second optimizer has stepped: nothing says yet that it does so again."""
    trace, finder = traced(several_in_a_row(2, 2), skip=skip)
    assert "in step 2 differ from those in earlier steps: choose --skip" in str(finder.failure)
    assert len(trace.steps) == 1 - skip


def test_iterations_that_become_shorter_are_no_steps_like_those_before() -> None:
    def loop() -> None:
        first, second = network(), network()
        one, other = (first, sgd(first)), (second, sgd(second))
        for theirs in (3, 3, 3, 2, 2):
            for model, optimizer in [one] * 2 + [other] * theirs:
                loss_of(model, torch.randn(4, 6)).backward()
                optimizer.step()

    trace, finder = traced(loop, skip=2)
    assert trace.steps == ["FBO" * 5]
    assert "the turns of the optimizers in step 4 differ" in str(finder.failure)


def test_optimizer_that_stepped_first_and_steps_no_more_is_dropped() -> None:
    trace, finder = traced(one_stage_after_the_other, skip=50)
    assert set(trace.steps) == {"FBO"}
    assert (finder.failure, finder.steps) == (None, 60)


def with_one_that_does_not_step(steps: int = 2 * MOST_TURNS, then: int = 0) -> None:
    model, other = network(), network()
    ours = [sgd(model)] * steps + [sgd(other)] * then
    for optimizer in ours:
        loss_of(model, torch.randn(4, 6)).backward()
        optimizer.step()


def test_optimizer_that_does_not_step_is_not_awaited_for_ever() -> None:
    trace, finder = traced(lambda: with_one_that_does_not_step(then=1), skip=3, wanted=3)
    assert (trace.steps, finder.steps) == (["FBO"] * 3, MOST_TURNS + 3)
    assert [*finder.remarks()] == [
        f"an optimizer is ignored, because it did not step in {MOST_TURNS} turns of other "
        f"optimizers"
    ]


@pytest.mark.parametrize(("skip", "heard", "differs"), [(0, 0, 1), (3, 3, MOST_TURNS + 4)])
def test_step_of_other_optimizers_than_those_before_it_does_not_count(
    skip: int, heard: int, differs: int
) -> None:
    trace, finder = traced(lambda: with_one_that_does_not_step(MOST_TURNS + 3, 13), skip=skip)
    assert len(trace.steps) == heard
    assert f"the turns of the optimizers in step {differs} differ" in str(finder.failure)


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


def test_module_that_is_looked_for_before_it_is_imported_is_wrapped_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers and peft look for torch."""
    (tmp_path / "wanted.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    finder = _AfterImport({"wanted"}, lambda module: seen.append(module.VALUE))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("wanted")
    assert not seen
    importlib.import_module("wanted")
    monkeypatch.delitem(sys.modules, "wanted")
    importlib.import_module("wanted")
    monkeypatch.delitem(sys.modules, "wanted")
    assert seen == [7]
