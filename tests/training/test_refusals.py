"""What Opacus cannot train is said in a line that names the layer and what would work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from dpbench import TRAINERS, Workload
from dpbench.child.build import smoke_test
from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.training.base import Batch
from tests.named import target

PRIVATE = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")


class Sequences(Workload):
    """Examples of five positions, through one layer, which is the model's part ``inner``."""

    def layer(self) -> nn.Module:
        return nn.Linear(16, 16)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), First(self.layer()))

    def batches(self, batch_size: int) -> list[Batch]:
        return [torch.randn(batch_size, 5, 16)]

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        return model(batch).reshape(len(batch), -1).square().mean(dim=1)


class First(nn.Module):
    """Hands on a layer's output, without its states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.inner, nn.MultiheadAttention)
        output = self.inner(x, x, x) if attends else self.inner(x)
        return output[0] if isinstance(output, tuple) else output


class Attention(Sequences):
    def layer(self) -> nn.Module:
        return nn.MultiheadAttention(16, 2, batch_first=True)


class BatchNorm(Sequences):
    def layer(self) -> nn.Module:
        return nn.BatchNorm1d(5)


class Tracked(Sequences):
    def layer(self) -> nn.Module:
        return nn.InstanceNorm1d(5, affine=True, track_running_stats=True)


class Buffered(Sequences):
    def layer(self) -> nn.Module:
        layer = nn.Linear(16, 16)
        layer.register_buffer("scale", torch.ones(1))
        return layer


class Bag(Sequences):
    def model(self) -> nn.Module:
        return nn.Sequential(First(nn.EmbeddingBag(50, 16)), nn.Linear(16, 3))

    def batches(self, batch_size: int) -> list[Batch]:
        return [torch.randint(50, (batch_size, 5))]


class Unused(Sequences):
    def model(self) -> nn.Module:
        model = super().model()
        model[1].other = nn.Linear(16, 16)
        return model


class WithoutEffect(Sequences):
    """A layer runs, and what it returns is dropped."""

    def model(self) -> nn.Module:
        class Dropping(First):
            def forward(self, x: Tensor) -> Tensor:
                self.other(x)
                return self.inner(x)

        dropping = Dropping(nn.Linear(16, 16))
        dropping.other = nn.Linear(16, 16)
        return nn.Sequential(nn.Linear(16, 16), dropping)


class Unheard(Sequences):
    """The model takes a layer's weight and does not call the layer."""

    def model(self) -> nn.Module:
        class Taking(First):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.linear(x, self.inner.weight)

        return nn.Sequential(nn.Linear(16, 16), Taking(nn.Linear(16, 16, bias=False)))


def refusal(attempt: Callable[[], Any]) -> str:
    with pytest.raises(DpbenchError) as caught:
        attempt()
    message = str(caught.value)
    assert "\n" not in message
    return message


def case_of(workload: type, trainer: str = "dpsgd") -> Case:
    return resolve(Case(trainer, 4, workload=target(workload)))


EACH = (
    (Attention, "(MultiheadAttention): ", "use opacus.layers.DPMultiheadAttention instead"),
    (BatchNorm, "1.inner (BatchNorm1d): BatchNorm cannot", "use GroupNorm instead, as opacus."),
    (Tracked, "1.inner (InstanceNorm1d): ", "make it with track_running_stats=False"),
    (Buffered, "layer 1.inner (Linear): it has buffers", "replace it, or freeze it"),
    (Bag, "layer 0.inner (EmbeddingBag): ", "pass offsets to it, or use Embedding and the"),
)
IN_STEP = (
    (Unused, "parameter 1.other.weight (and 1 more): ", "freeze it with requires_grad_(False)"),
    (WithoutEffect, "parameter 1.other.weight (and 1 more): ", "freeze it with"),
    (Unheard, "1.inner.weight: it found no per-sample gradient or norm", "call the layer"),
)


@pytest.mark.parametrize(
    ("workload", "layer", "way_out", "trainer"),
    [
        *((*each, "dpsgd") for each in EACH),
        *((*each, trainer) for each in IN_STEP for trainer in PRIVATE),
    ],
)
def test_it_is_named_with_what_would_work(
    workload: type, layer: str, way_out: str, trainer: str
) -> None:
    case = case_of(workload, trainer)
    for attempt in (partial(smoke_test, case), partial(Logical().count, case)):
        message = refusal(attempt)
        assert message.startswith("Opacus ")
        assert layer in message
        assert way_out in message
    smoke_test(case_of(workload, "standard"))


def test_what_opacus_can_train_is_not_refused() -> None:
    for trainer in PRIVATE:
        smoke_test(case_of(Sequences, trainer))


def test_the_way_out_is_one() -> None:
    torch.manual_seed(0)
    model = ModuleValidator.fix(BatchNorm().model())
    made = TRAINERS["dpsgd"](model, batch_size=4, workload=BatchNorm())
    made.train_step(BatchNorm().batches(4)[0])


def test_a_command_says_it_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    named = f"--workload={__name__}:Bag"
    assert main(["step", "--trainer=dpsgd", "--device=cpu", named, "--batch-size=4"]) == 2
    said = capsys.readouterr().err
    assert "Opacus cannot train layer 0.inner (EmbeddingBag)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["CUDA error: unspecified launch failure", "not enough memory"])
def test_no_layer_is_blamed_for_the_machine(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, nn.Linear, fail)
    with pytest.raises(RuntimeError, match=words):
        smoke_test(case_of(Sequences))


def test_running_out_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, nn.Linear, fail)
    with pytest.raises(torch.OutOfMemoryError):
        smoke_test(case_of(Sequences))
