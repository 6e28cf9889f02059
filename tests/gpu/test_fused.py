"""The fused trainer on a GPU: its kernels, its graphs, and the memory that these keep."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, SimpleBigModel, get_random_dataloader
from dpbench.errors import ConfigurationError
from dpbench.instruments.logical.counter import RunningCounter
from dpbench.model_size import ModelSize
from dpbench.process.step import peak_memory
from dpbench.training import kernels
from dpbench.training.base import Batch, Momentum
from dpbench.training.gradient_sums import Sums
from dpbench.training.kernels import (
    TILINGS,
    gram_norms,
    gram_norms_by_kernel,
    gram_sums,
    layer_norm_samples,
    noisy_descent,
    products,
    scaled,
)
from dpbench.training.norm_bounds import squared_norms_of_alike, squared_product_norms
from dpbench.training.phases import observed_step
from tests.training.test_norm_bounds import OURS, alike, update_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]

SIZE = ModelSize(500, 64, 2, 4)


@pytest.fixture(autouse=True)
def ieee() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def squared_norms(xs: list[Tensor], gs: list[Tensor], bias: bool = False) -> Tensor:
    """By the kernel, where there is one for the type; what clips is held to be no smaller."""
    known = gs[0].dtype in TILINGS
    norms = (gram_norms_by_kernel if known else gram_norms)(xs, gs, bias)[0].double().sum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SMALL", 0)  # so that the kernel is what is held
        bounds = squared_norms_of_alike(xs, gs, bias).double().sum(0)
    assert (bounds >= norms * (1 - 1e-5)).all()
    return norms


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 11])
@pytest.mark.parametrize(
    "shape",
    [(4, 1, 8, 8), (3, 40, 48, 100), (2, 256, 72, 50), (3, 600, 33, 7), (1, 16_384, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gram_norms_are_those_of_the_gradients(
    dtype: torch.dtype, shape: tuple[int, ...], layers: int, bias: bool
) -> None:
    examples, tokens, width, height = shape
    xs = [normal(examples, tokens, width, dtype=dtype) for _ in range(layers)]
    gs = [normal(examples, tokens, height, dtype=dtype) for _ in range(layers)]
    expected = torch.zeros(examples, dtype=torch.float64, device="cuda")
    for x, g in zip(xs, gs, strict=True):
        expected += torch.bmm(g.double().mT, x.double()).square().sum((1, 2))
        expected += g.double().sum(1).square().sum(1) if bias else 0
    # Of T × T products that cancel the more is left by rounding the longer an example is.
    rtol = 1e-5 if tokens < 1000 else 3e-5
    torch.testing.assert_close(squared_norms(xs, gs, bias), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_norms_of_tensors_that_begin_within_a_word(dtype: torch.dtype) -> None:
    x, g = (normal(1 + 2 * 256 * 64, dtype=dtype)[1:].view(2, 256, 64) for _ in range(2))
    expected = torch.bmm(g.double().mT, x.double()).square().sum((1, 2))
    norms = squared_norms([x], [g])
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(squared_norms([x.clone()], [g.clone()]), norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_example_of_more_numbers_than_32_bits_count(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 18_000, 120_000, dtype=dtype, device="cuda")
    g = torch.zeros(1, 18_000, 16, dtype=dtype, device="cuda")
    x[0, -2:, -1], g[0, -2:, 0] = 2, 1
    assert squared_norms([x], [g]).tolist() == [16]
    assert scaled(x, torch.full((1,), 0.5, device="cuda"))[0, -1, -1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_examples_than_a_grid_has_rows(dtype: torch.dtype) -> None:
    x, g = normal(70_000, 1, 16, dtype=dtype), normal(70_000, 1, 8, dtype=dtype)
    expected = x.double().square().sum((1, 2)) * g.double().square().sum((1, 2))
    torch.testing.assert_close(squared_norms([x], [g]), expected, rtol=1e-5, atol=0)
    factors = torch.rand(70_000, device="cuda")
    torch.testing.assert_close(scaled(x, factors), (x * factors[:, None, None]).to(dtype))


@pytest.mark.parametrize("tokens", [5, 200, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_norms_of_embeddings_add_up_rows_named_twice(dtype: torch.dtype, tokens: int) -> None:
    rows = torch.randint(9, (3, tokens), device="cuda")
    g = normal(3, tokens, 24, dtype=dtype)
    samples = torch.zeros(3, 9, 24, dtype=torch.float64, device="cuda")
    for sample, named, gradients in zip(samples, rows, g, strict=True):
        sample.index_add_(0, named, gradients.double())
    expected = samples.square().sum((1, 2))
    norms = squared_norms([rows], [g])
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [5, 130, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_products_are_those_of_the_cpu(dtype: torch.dtype, tokens: int) -> None:
    made = products(normal(3, tokens, 24, dtype=dtype), normal(3, tokens, 40, dtype=dtype))
    of_x, of_g = (each.to(dtype) for each in made)
    expected = gram_sums(of_x.cpu().double(), of_g.cpu().double())
    torch.testing.assert_close(gram_sums(of_x, of_g).cpu().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(128, 32), (16, 256), (1024, 2048)])
@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_norms_of_tokens_that_are_alike_are_no_smaller_than_the_gradients(
    tokens: int, width: int, offset: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, g = normal(2, tokens, width) + offset, normal(2, tokens, width)
    x, g = x.to(dtype), (g - g.mean(1, keepdim=True) * (offset > 0)).to(dtype)
    expected = torch.bmm(g.double().mT, x.double()).square().sum((1, 2))
    for small in (kernels.SMALL, 0):
        monkeypatch.setattr(kernels, "SMALL", small)
        assert (squared_product_norms(x, g).double() >= expected).all()
        assert (squared_norms_of_alike([x], [g], False)[0].double() >= expected).all()


@pytest.mark.parametrize(
    ("dtype", "offset"), [(torch.float32, 1e4), (torch.bfloat16, 100), (torch.float64, 1e7)]
)
@pytest.mark.parametrize(("tokens", "width"), [(128, 32), (16, 256), (1024, 2048)])
@pytest.mark.parametrize("trainer", OURS)
def test_tokens_that_are_alike_are_clipped(
    trainer: str, tokens: int, width: int, dtype: torch.dtype, offset: float
) -> None:
    given = [each.to("cuda") for each in alike(0, tokens, width, width, offset, dtype)]
    layer = nn.Linear(width, width, dtype=dtype, device="cuda")
    assert update_of(trainer, layer, (given[0], given[1])).norm() <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [7, 64, 2048])
def test_examples_are_scaled_as_by_pytorch(width: int, dtype: torch.dtype) -> None:
    tensor, factors = normal(3, 33, width, dtype=dtype), torch.rand(3, device="cuda")
    across = tensor.mT
    for each in (tensor, across, across.contiguous()[:, 1:]):
        expected = (each.double() * factors.double()[:, None, None]).to(dtype)
        torch.testing.assert_close(scaled(each, factors), expected)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@pytest.mark.parametrize("width", [7, 64, 2048])
def test_layer_norm_samples_are_those_of_the_cpu(
    width: int, dtype: torch.dtype, off: float
) -> None:
    x, g = normal(3, 33, width, dtype=dtype), normal(3, 33, width, dtype=dtype)
    expected = layer_norm_samples(x.cpu(), g.cpu(), 1e-5)
    torch.testing.assert_close(layer_norm_samples(x, g, 1e-5).cpu(), expected, rtol=off, atol=off)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_an_update_is_as_exact_as_its_parameters(dtype: torch.dtype, off: float) -> None:
    values, gradient = (torch.rand(10_000, dtype=torch.float64, device="cuda") for _ in range(2))
    values, gradient = values.to(dtype), gradient.to(dtype)
    expected = values.double() - 0.3 * gradient.double()
    noisy_descent(values, gradient, torch.tensor(1, device="cuda"), 0.0, 0.3)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=off)


def test_the_update_draws_normal_noise_of_its_deviation_anew_for_each_seed() -> None:
    length, deviation, rate = 3_000_001, 3.0, 0.5
    gradient = normal(length)

    def noise(seed: int) -> Tensor:
        moved = torch.zeros(length, device="cuda")
        noisy_descent(moved, gradient, torch.tensor(seed, device="cuda"), deviation, rate)
        return -moved / rate - gradient

    first, second = noise(2**40), noise(2**40 + 1)
    assert torch.equal(first, noise(2**40))
    assert abs(first.std() / deviation - 1) < 5 / (2 * length) ** 0.5
    assert abs(first.mean()) < 5 * deviation / length**0.5
    for lag in (1, 2, 3, 4, 1024, 4096):
        together = torch.stack([first, first.roll(lag)])
        assert abs(torch.corrcoef(together)[0, 1]) < 5 / length**0.5
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / length**0.5


def test_one_number_of_two_million_is_further_out_than_five_deviations() -> None:
    """As it should be, and some are further than 5.7, where Triton's own normal numbers end."""
    length, beyond, largest = 2**28, 0, 0.0
    for seed in range(8):
        moved = torch.zeros(length, device="cuda")
        noisy_descent(moved, torch.zeros_like(moved), torch.tensor(seed, device="cuda"), 1.0, 1.0)
        beyond += int((moved.abs() > 5).sum())
        largest = max(largest, float(moved.abs().max()))
    expected = 8 * length * math.erfc(5 / 2**0.5)
    assert abs(beyond - expected) < 6 * expected**0.5
    assert 5.7 < largest < 7


# --- steps ---------------------------------------------------------------------------------------


def made(trainer: str, size: ModelSize = SIZE, **options: Any) -> Any:
    torch.manual_seed(0)
    model = SimpleBigModel(size, max_seq_len=700).to("cuda")
    fixed = {"noise_multiplier": 0.0, "learning_rate": 1.0, "max_grad_norm": 0.5}
    return TRAINERS[trainer](model, batch_size=6, **fixed | options)


def batches_of(tokens: int, number: int = 1) -> list[Batch]:
    loader = get_random_dataloader(batch_size=6, seq_len=tokens, vocab_size=500, device="cuda")
    return list(loader)[:number]


def parameters(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()


def moved(train: Callable[[Any], object], trainer: Any) -> Tensor:
    before = parameters(trainer)
    train(trainer)
    return parameters(trainer) - before


def train_several_shapes_and_rates(trainer: Any) -> None:
    for tokens, rate in ((40, 0.5), (40, 0.2), (256, 0.5), (40, 0.3), (600, 0.5)):
        trainer.plain_optimizer.param_groups[0]["lr"] = rate
        for batch in batches_of(tokens):
            trainer.train_step(batch)


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": Momentum}, {"micro_batches": 3}, {"autocast": torch.bfloat16}],
    ids=str,
)
def test_steps_of_several_shapes_and_rates_are_those_of_opacus(options: dict[str, Any]) -> None:
    reference = moved(train_several_shapes_and_rates, made("dpsgd", **options))
    tolerance = 3e-2 if "autocast" in options else 1e-4
    for name in ("book_keeping", "fused"):
        update = moved(train_several_shapes_and_rates, made(name, **options))
        assert (update - reference).norm() < tolerance * reference.norm(), name


def test_the_first_step_makes_the_graphs_and_returns_the_loss_of_its_own_batch() -> None:
    trainer, plain = made("fused"), made("book_keeping")
    for number, batch in enumerate(batches_of(40, 3)):
        losses = [float(each.train_step(batch)) for each in (trainer, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert [*trainer._graphs] == ["forward", "backward", "clip"], number
    with pytest.raises(ValueError, match="built for batches of 6 and got one of 5"):
        trainer.train_step(tuple(tensor[:5] for tensor in batches_of(40)[0]))


def test_dropout_ends_with_eval_and_begins_again_with_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SimpleBigModel(SIZE, max_seq_len=700), nn.Dropout(0.9)).to("cuda")
    trainer = TRAINERS["fused"](model, batch_size=6, noise_multiplier=0.0, learning_rate=0.0)
    [batch] = batches_of(40)
    first, second = (float(trainer.train_step(batch)) for _ in range(2))
    assert [*trainer._graphs] == ["forward", "backward", "clip"]
    assert first != second
    model.eval()
    expected = float(trainer.mean_loss(model, batch).detach())
    assert [float(trainer.train_step(batch)) for _ in range(2)] == pytest.approx([expected] * 2)
    model.train()
    assert abs(float(trainer.train_step(batch)) - expected) > 0.1 * expected


def test_a_parameter_that_moved_or_froze_is_refused_before_a_graph_trains() -> None:
    [batch] = batches_of(40)
    for change in (
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: weight.requires_grad_(False),
    ):
        trainer = made("fused")
        trainer.train_step(batch)
        change(trainer.model.head.weight)
        before = parameters(trainer)
        with pytest.raises(ConfigurationError, match=r"parameter head.weight was"):
            trainer.train_step(batch)
        assert torch.equal(parameters(trainer), before)


def test_a_step_whose_operators_are_counted_runs_them() -> None:
    trainer = made("fused")
    [batch] = batches_of(40)
    trainer.train_step(batch)
    with RunningCounter() as counter:
        with observed_step(counter):
            trainer.train_step(batch)
        operators = {count.operator for count in counter.operators}
    assert operators >= {"dpbench.gram_norms", "dpbench.noisy_descent", "aten.mm"}


@pytest.mark.parametrize("reads", [False, True])
def test_a_graph_has_the_operators_of_a_step_that_is_not_captured(reads: bool) -> None:
    """A model that runs others while it is captured does so only if it reads from the GPU."""

    class Asking(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            captured = torch.cuda.is_current_stream_capturing()
            if reads and not captured:
                assert tokens.sum().item() >= 0
            seen.append(captured)
            logits: Tensor = super().forward(tokens)
            return logits

    seen: list[bool] = []
    trainer = TRAINERS["fused"](Asking(SIZE, max_seq_len=700).to("cuda"), batch_size=6)
    for batch in batches_of(40, 2):
        trainer.train_step(batch)
    assert seen == [False, reads]
    assert [*trainer._graphs] == ["forward", "backward", "clip"]


def test_a_warning_of_the_first_forward_is_shown_and_debugging_stays_as_it_was() -> None:
    class Warns(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            warnings.warn("of the model", stacklevel=1)
            logits: Tensor = super().forward(tokens)
            return logits

    trainer = TRAINERS["fused"](Warns(SIZE, max_seq_len=700).to("cuda"), batch_size=6)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="of the model"):
            trainer.train_step(batches_of(40)[0])
        assert torch.cuda.get_sync_debug_mode() == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_has_what_graphs_keep() -> None:
    [batch] = batches_of(600)

    def peaks(*, graphs: bool) -> tuple[int, int]:
        trainer = made("fused", ModelSize(8000, 256, 4, 8))
        if not graphs:
            trainer._graphs = {}  # as after a first step without them
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step(batch)
        return torch.cuda.max_memory_allocated(), peak_memory() - before

    gc.collect()
    torch.cuda.empty_cache()
    before = peak_memory() - torch.cuda.max_memory_allocated()  # what other tests' graphs keep
    allocated, without = peaks(graphs=False)
    assert without == allocated
    gc.collect()  # a trainer and the hooks of its layers refer to each other
    torch.cuda.empty_cache()
    shown, kept = peaks(graphs=True)
    assert shown < 0.7 * without, "the allocator counts it itself: take what it says"
    assert 0.9 * without < kept < 1.5 * without


def test_at_bf16_a_token_that_is_everywhere_counts_each_time() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16, device="cuda"))
    sums = Sums([weight])
    tokens = torch.ones(1000, dtype=torch.long, device="cuda")
    sums.put_rows(weight, tokens, torch.ones(1000, 2, dtype=torch.bfloat16, device="cuda"))
    sums.finish()
    assert sums.places[weight].tolist() == [[0, 0], [1000, 1000], [0, 0]]
