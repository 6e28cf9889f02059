"""Clipping from activations and output gradients: right in every layer, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench import TRAINERS, Batch, Case, Workload
from dpbench.training import kernels
from dpbench.training.base import Momentum
from dpbench.verify.reference import Examples
from dpbench.verify.verification import Verification

PLAIN = "fused:graphs=false,kernels=false"
BOTH = (PLAIN, "fused")
PRIVATE = (*BOTH, "micro_batch")
EXAMPLES = 5


class Given(Workload):
    """A model and a batch that are there, and a loss in which each output counts."""

    def __init__(self, model: Callable[[], nn.Module], batch: Tensor) -> None:
        self._model, self._batch = model, batch

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self._model()

    def batches(self, batch_size: int) -> list[Batch]:
        return [self._batch]

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return (3 * model(batch).flatten(1)).sin().sum(1)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One layer that is called twice, with different lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), self.layer(x[:, :1].cos())], 1)


class Scale(nn.Module):
    """A layer that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, self.gain, x.exp())


class Temperature(nn.Module):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log.exp()


class Shared(nn.Module):
    """Layers that are given the same, or other views of its memory, from the same place on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, width) for width in (4, 4, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :4].tanh()
        views = (x, x.mT, x, x)
        return torch.cat([layer(v) for layer, v in zip(self.layers, views, strict=True)], 2)


class Residual(nn.Module):
    """Adds its input to a layer's output in place, as model code often does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y += x
        return y


class Turned(nn.Linear):
    """A layer whose output is a view in another order than its memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class FirstOf(nn.Module):
    """What a recurrent layer returns, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


class SumOfPositions(nn.Module):
    """The gradient of its input is expanded, so it has the memory of one position."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3))


class CheckpointedTheOtherWay(nn.Module):
    """A block that runs again in backward, not reentrantly."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


def without_bias(layer: nn.Module) -> nn.Module:
    layer.register_parameter("bias", None)
    return layer


def frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


def only_the_last_trained() -> nn.Module:
    model = between(nn.Linear(6, 6)).requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 2))


torch.manual_seed(1)
FLAT, TOKENS = torch.randn(EXAMPLES, 6), torch.randn(EXAMPLES, 4, 6)
IMAGES, IDS = torch.randn(EXAMPLES, 2, 5, 5), torch.randint(9, (EXAMPLES, 4))

LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "2-D": (lambda: between(nn.Linear(6, 6)), FLAT),
    "3-D": (lambda: between(nn.Linear(6, 6, bias=False)), TOKENS),
    "4-D": (lambda: between(nn.Linear(6, 6)), torch.randn(EXAMPLES, 2, 4, 6)),
    "many tokens": (lambda: between(nn.Linear(6, 6)), torch.randn(EXAMPLES, 20, 6)),
    "wide": (lambda: nn.Linear(6, 40), TOKENS),
    "twice": (lambda: Twice(between(nn.Linear(6, 6))), TOKENS),
    "weight frozen": (lambda: frozen(between(nn.Linear(6, 6)), "2.weight"), TOKENS),
    "bias frozen": (lambda: frozen(between(nn.Linear(6, 6)), "0.bias"), TOKENS),
    "all before frozen": (lambda: only_the_last_trained(), TOKENS),
    "LayerNorm": (lambda: between(nn.LayerNorm(6)), TOKENS),
    "LayerNorm of 2-D": (lambda: between(nn.LayerNorm(6, bias=False)), FLAT),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((4, 6)), TOKENS),
    "LayerNorm twice": (lambda: Twice(nn.LayerNorm(6)), TOKENS),
    "RMSNorm": (lambda: between(nn.RMSNorm(6)), TOKENS),
    "a scalar": (lambda: between(Temperature()), TOKENS),
    "shared": (Shared, TOKENS),
    "unknown": (lambda: between(Scale()), TOKENS),
    "unknown twice": (lambda: Twice(Scale()), TOKENS),
    "unknown, frozen in part": (lambda: frozen(between(Scale()), "2.gain"), TOKENS),
    "Conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), IMAGES),
    "GroupNorm, summed": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(1, 4), SumOfPositions()),
        IMAGES,
    ),
    "GroupNorm without a bias": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), without_bias(nn.GroupNorm(2, 4))),
        IMAGES,
    ),
    "Conv changed in place": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 2)),
        IMAGES,
    ),
    "3-D changed in place": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)),
        TOKENS,
    ),
    "3-D with a residual in place": (lambda: between(Residual(nn.Linear(6, 6))), TOKENS),
    "turned and changed in place": (lambda: between(Residual(Turned(4, 4))), TOKENS),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3)), IDS),
    "Embedding of int32": (lambda: nn.Embedding(9, 6), IDS.int()),
    "Embedding of one row": (lambda: nn.Embedding(9, 6), IDS[:, 0]),
    "Embedding of 3-D": (lambda: nn.Embedding(9, 6), IDS.reshape(EXAMPLES, 2, 2)),
    "Embedding with padding": (lambda: nn.Embedding(9, 6, padding_idx=int(IDS[0, 0])), IDS),
    "recurrent": (lambda: FirstOf(DPLSTM(6, 6, batch_first=True)), TOKENS),
    "checkpointed the other way": (CheckpointedTheOtherWay, TOKENS),
}


CLIPPED = [
    *((layers, trainer) for layers in LAYERS if layers != "recurrent" for trainer in BOTH),
    *((layers, "micro_batch") for layers in ("3-D", "recurrent")),
]


def clipped_mean(workload: Workload, model: nn.Module, batch: Batch) -> tuple[list[Tensor], float]:
    """By a loop over examples: the mean of the clipped gradients, and a threshold for half."""
    examples = Examples.computed(model, batch, workload.losses)
    threshold = float(examples.norms.norm(dim=1).median())
    return [*examples.mean(examples.factors("flat", threshold)).values()], threshold


def double(model: nn.Module, batch: Tensor) -> tuple[nn.Module, Tensor]:
    return model.double(), batch.double() if batch.is_floating_point() else batch


def check_clipped(workload: Workload, trainer: str) -> None:
    """Compare a step with the mean of the clipped gradients of a loop over examples."""
    model, batch = double(workload.model(), workload.batches(EXAMPLES)[0])
    expected, threshold = clipped_mean(workload, copy.deepcopy(model), batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    made = TRAINERS[trainer](
        model,
        batch_size=EXAMPLES,
        workload=workload,
        noise_multiplier=0.0,
        max_grad_norm=threshold,
        learning_rate=1.0,
    )
    made.train_step(batch)
    for parameter, old, gradient in zip(trained, before, expected, strict=True):
        assert gradient.any()
        assert (old - parameter - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize(("layers", "trainer"), CLIPPED)
def test_each_parameter_moves_by_the_mean_of_its_clipped_per_example_gradients(
    layers: str, trainer: str
) -> None:
    check_clipped(Given(*LAYERS[layers]), trainer)


class Odd(nn.Module):
    """Layers with odd numbers of outputs: with a bias, of Hugging Face, called twice, and tied."""

    def __init__(self, turned: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.rows.weight
        self.turned, self.biased = turned(7, 5), nn.Linear(7, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.biased(self.turned(self.rows(ids)).tanh()).tanh()
        return torch.cat([self.head(x), self.head(self.biased(self.turned(x)))], 1)


def test_rows_that_are_lengthened_change_no_clipped_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    monkeypatch.setattr(kernels, "LARGE", 1)
    check_clipped(Given(lambda: Odd(conv), IDS), "fused")


class Narrow(nn.Module):
    """A linear layer in bf16 between layers in float32, as some models keep their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.narrow = nn.Linear(6, 6).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.first(self.narrow(self.norm(x).bfloat16()).float())
        return whole


@pytest.mark.parametrize("trainer", BOTH)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_of_two_types_are_trained_together(
    trainer: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    workload = Given(Narrow, TOKENS)
    model = workload.model()
    expected, threshold = clipped_mean(workload, copy.deepcopy(model), TOKENS)
    trained = [*model.parameters()]
    made = TRAINERS[trainer](
        model,
        batch_size=EXAMPLES,
        workload=workload,
        noise_multiplier=0.0,
        max_grad_norm=threshold,
        learning_rate=1.0,
        optimizer=optimizer,
    )
    before = [p.detach().clone() for p in trained]
    made.train_step(TOKENS)
    other = [each.clone().requires_grad_() for each in before]
    for each, gradient in zip(other, expected, strict=True):
        each.grad = gradient.to(each.dtype)
    optimizer(other, lr=1.0).step()  # type: ignore[call-arg]
    for parameter, right, old in zip(trained, other, before, strict=True):
        assert parameter.dtype == old.dtype
        assert (parameter - right).norm() <= 0.02 * (right - old).norm()


class Cancelling(nn.Module):
    """Weights of tokens that are all the same: what one token adds to a gradient, others take."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 600, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.scores(x).softmax(1)
        return (weights * torch.arange(64.0)[:, None]).sum(1)


@pytest.mark.parametrize("trainer", BOTH)
def test_gradients_that_cancel_leave_parameters_numbers(trainer: str) -> None:
    torch.manual_seed(0)
    alike = 10 * torch.randn(EXAMPLES, 1, 16).expand(EXAMPLES, 64, 16)
    workload = Given(Cancelling, alike.contiguous())
    model = workload.model()
    made = TRAINERS[trainer](model, batch_size=EXAMPLES, workload=workload, noise_multiplier=0.0)
    made.train_step(workload.batches(EXAMPLES)[0])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("trainer", PRIVATE)
@pytest.mark.parametrize("options", [{}, {"optimizer": Momentum}, {"micro_batches": 5}], ids=str)
def test_a_step_that_failed_leaves_nothing_to_the_next(
    trainer: str, options: dict[str, Any]
) -> None:
    class FailsOnce(Given):
        fails = 0

        def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
            losses = super().losses(model, batch)
            self.fails -= 1
            if self.fails == 0:
                raise RuntimeError("no more")
            return losses

    def trained(*, fails: int) -> Tensor:
        workload = FailsOnce(*LAYERS["3-D"])
        model = workload.model()
        made = TRAINERS[trainer](
            model, batch_size=EXAMPLES, workload=workload, noise_multiplier=0.0, **options
        )
        if hasattr(made, "prepare"):
            made.prepare(TOKENS)  # which runs the model
        workload.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="no more"):
                made.train_step(TOKENS)
        made.train_step(TOKENS)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    fails = options.get("micro_batches", 1)
    assert torch.equal(trained(fails=fails), trained(fails=0))


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(trainer, marks=[pytest.mark.slow] if trainer != "fused" else [])
        for trainer in PRIVATE
    ],
)
def test_at_fp32_each_gradient_of_long_sequences_is_within_1e5_of_that_at_float64(
    trainer: str,
) -> None:
    case = Case(trainer, EXAMPLES, 256, "tiny", optimizer="momentum")
    checks = Verification(case, torch.device("cpu"), clips="flat")
    for batching in checks.batchings:
        for threshold in (checks.half, checks.below_all):
            assert checks.gradient("", batching, threshold, sigma=0.0).passed
