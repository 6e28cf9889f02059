"""The axis ``compile``: compiled trainers take the same steps as uncompiled ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dpbench.child.build import build
from dpbench.child.case import run_case
from dpbench.core.case import Case
from dpbench.core.errors import CaseFailed, ConfigurationError
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import TimingRecorder

CPU = torch.device("cpu")
COMPILED = ["standard", "micro_batch"]
compiled = partial(Case, batch_size=2, seq_len=8, model_size="50x16x1x2", compile="on")


def trained(case: Case) -> torch.Tensor:
    made, batches = build(case, CPU, 2, noise_multiplier=0.0, learning_rate=1.0)
    for batch in batches:
        made.train_step(batch)
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and AOTAutograd compile, and no compiler of C++, which takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.repeats
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "trainer", ["standard", pytest.param("micro_batch", marks=pytest.mark.slow)]
)
def test_compiled_steps_update_as_others_do(trainer: str) -> None:
    case = compiled(trainer, micro_batches=2)
    eager = compiled(trainer, micro_batches=2, compile="off")
    torch.testing.assert_close(trained(case), trained(eager), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", COMPILED)
def test_so_do_steps_that_inductor_compiles(trainer: str) -> None:
    eager = trained(compiled(trainer, compile="off"))
    torch.testing.assert_close(trained(compiled(trainer)), eager, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "axes", [{}, pytest.param({"sampling": "poisson"}, marks=pytest.mark.slow)], ids=str
)
def test_nothing_is_compiled_in_steps_that_count(axes: dict[str, Any]) -> None:
    case = compiled("standard", **axes)
    outcome = run_case(case, TimingRecorder(3), device="cpu", warmup=1, active=3)
    assert len(outcome.details["phase_seconds"]) == 3


@pytest.mark.usefixtures("without_inductor")
def test_a_step_that_compiles_does_not_count() -> None:
    with pytest.raises(ConfigurationError, match="compiled a function during a counted step"):
        run_case(compiled("standard"), TimingRecorder(1), device="cpu", warmup=0, active=1)


@pytest.mark.parametrize("trainer", [t for t in TRAINERS if t not in COMPILED])
def test_trainers_with_hooks_say_that_they_cannot_be_compiled(trainer: str) -> None:
    with pytest.raises(ConfigurationError, match="does not train under compile=on: compiled"):
        build(compiled(trainer), CPU, 1)


def test_fused_operators_are_not_counted() -> None:
    with pytest.raises(CaseFailed, match="the bytes of fused operators cannot be counted"):
        Logical().count(compiled("standard"))


def test_ranks_are_not_compiled() -> None:
    with pytest.raises(ConfigurationError, match="compile=on supports one GPU only, and gpus is 2"):
        compiled("standard", gpus=2, parallel="ddp")
