"""The operators of trainers on a GPU: by kernels and by PyTorch, held to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpbench.core.case import ModelSize
from dpbench.training import kernels
from dpbench.training.kernels import (
    TILINGS,
    gram_norms,
    gram_norms_by_kernel,
    gram_sums,
    layer_norm_samples,
    multiplied_by_kernel,
    products,
    put_product,
    weighted_sum,
    without_dropped,
)
from dpbench.training.norms import squared_norms_of_alike
from tests.training.test_norms import OURS, alike, norms_of, update_of

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
@pytest.mark.parametrize(("inputs", "joined"), [(1, 3), (11, 1)])
@pytest.mark.parametrize(
    "shape",
    [(4, 1, 8, 8), (3, 40, 48, 100), (2, 300, 128, 64), (3, 600, 33, 7), (1, 16_384, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gram_norms_are_those_of_the_gradients(
    dtype: torch.dtype, shape: tuple[int, ...], inputs: int, joined: int, bias: bool
) -> None:
    examples, tokens, width, height = shape
    xs = [normal(examples, tokens, width, dtype=dtype) for _ in range(inputs)]
    gs = [normal(examples, tokens, height, dtype=dtype) for _ in range(inputs * joined)]
    expected = torch.zeros(examples, dtype=torch.float64, device="cuda")
    for x, g in zip([x for x in xs for _ in range(joined)], gs, strict=True):
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
    assert multiplied_by_kernel(x, torch.full((1,), 0.5, device="cuda"))[0, -1, -1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_examples_than_a_grid_has_rows(dtype: torch.dtype) -> None:
    x, g = normal(70_000, 1, 16, dtype=dtype), normal(70_000, 1, 8, dtype=dtype)
    expected = x.double().square().sum((1, 2)) * g.double().square().sum((1, 2))
    torch.testing.assert_close(squared_norms([x], [g]), expected, rtol=1e-5, atol=0)
    factors = torch.rand(70_000, device="cuda")
    torch.testing.assert_close(
        multiplied_by_kernel(x, factors), (x * factors[:, None, None]).to(dtype)
    )


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
        assert (norms_of(x, g, "products").square() >= expected).all()
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


@pytest.mark.parametrize("offset", [0, 100, 1e4])
@pytest.mark.parametrize(("tokens", "width"), [(128, 32), (16, 256), (1024, 512), (1024, 2048)])
@pytest.mark.parametrize("trainer", OURS)
@pytest.mark.parametrize("small", [kernels.SMALL, 0])
def test_with_tf32_examples_are_clipped_to_little_less_than_the_threshold(
    trainer: str,
    tokens: int,
    width: int,
    offset: float,
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "SMALL", small)  # 0: not in float64, of which all here are
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    x, g = (each.cuda() for each in alike(0, tokens, width, width, offset, torch.float32))
    norm = update_of(trainer, nn.Linear(width, width, device="cuda"), (x, g)).norm()
    assert norm <= 1 + 1e-6
    if not offset:
        assert norm > 0.99


@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (64, 256), (1024, 2048)])
@pytest.mark.parametrize("trainer", OURS)
@pytest.mark.parametrize("small", [kernels.SMALL, 0])
def test_with_tf32_numbers_that_are_rounded_up_are_clipped(
    trainer: str, tokens: int, width: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SMALL", small)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    given = torch.full((1, tokens, width), 1 + 2.0**-10 - 2.0**-23, device="cuda")
    layer = nn.Linear(width, width, bias=False, device="cuda")
    assert 0.99 < update_of(trainer, layer, (given, given)).norm() <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [7, 64, 2048])
def test_examples_are_scaled_as_by_pytorch(width: int, dtype: torch.dtype) -> None:
    tensor, factors = normal(3, 33, width, dtype=dtype), torch.rand(3, device="cuda")
    across = tensor.mT
    for each in (tensor, across, across.contiguous()[:, 1:]):
        expected = (each.double() * factors.double()[:, None, None]).to(dtype)
        torch.testing.assert_close(multiplied_by_kernel(each, factors), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("examples", "length"), [(0, 10), (1, 5000), (3, 2048), (70, 12_345)])
def test_sums_of_kept_gradients_are_those_of_the_cpu(
    examples: int, length: int, dtype: torch.dtype
) -> None:
    samples, factors = normal(examples, length, dtype=dtype), torch.rand(examples, device="cuda")
    sums = torch.full((length,), torch.nan, dtype=dtype, device="cuda")
    weighted_sum(samples, factors, sums)
    expected = factors.double() @ samples.double()
    off = (
        torch.finfo(dtype).eps * expected.abs().clamp(min=1) * (1 + examples * (dtype.itemsize > 2))
    )
    assert ((sums.double() - expected).abs() <= off).all()


def test_a_dropped_example_adds_nothing_and_is_cleared() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        samples, factors = normal(4, 5000, dtype=dtype), torch.tensor([1, 0, 0.5, 0]).cuda()
        samples[1::2] = torch.nan
        expected = samples[0].double() + samples[2].double() / 2
        sums = torch.empty(
            5000, dtype=torch.float64 if dtype.itemsize > 4 else torch.float32
        ).cuda()
        weighted_sum(samples, factors, sums)
        torch.testing.assert_close(sums.double(), expected, atol=1e-5, rtol=1e-5)
        kept = samples[::2].clone()
        cleared = without_dropped(samples.view(4, 50, 100), factors, in_place=True)
        assert cleared.data_ptr() == samples.data_ptr()
        assert not samples[1::2].any()
        assert torch.equal(samples[::2], kept)


@pytest.mark.parametrize("adds", [False, True])
def test_products_of_16_bits_are_summed_in_float32(adds: bool) -> None:
    a, b = normal(1000, 64, dtype=torch.bfloat16).t(), normal(1000, 32, dtype=torch.bfloat16)
    total = torch.full((64, 32), 1000.0 if adds else torch.nan, device="cuda")
    put_product(total, a, b, adds=adds)
    expected = a.double() @ b.double() + 1000.0 * adds
    torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=1e-5)


def test_gradients_of_more_numbers_than_32_bits_count() -> None:
    samples = torch.zeros(3, 2**30, dtype=torch.bfloat16, device="cuda")
    samples[:, -1] = 1
    sums = torch.empty_like(samples[0])
    weighted_sum(samples, torch.tensor([0.5, 0.25, 1.0], device="cuda"), sums)
    assert sums[-1] == 1.75
    assert not sums[:-1].any()


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@pytest.mark.parametrize("width", [7, 64, 2048])
def test_layer_norm_samples_are_those_of_the_cpu(
    width: int, dtype: torch.dtype, off: float
) -> None:
    x, g = normal(3, 33, width, dtype=dtype), normal(3, 33, width, dtype=dtype)
    expected = layer_norm_samples(x.cpu(), g.cpu(), 1e-5)
    torch.testing.assert_close(layer_norm_samples(x, g, 1e-5).cpu(), expected, rtol=off, atol=off)
