"""Convolutions in one backward pass: the update of a loop over examples, and little memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench import TRAINERS
from dpbench.training import convolutions, kernels
from dpbench.training.norms import KEPT, PRODUCTS, GhostNorms, total
from dpbench.verify.reference import Examples
from tests.training.test_fused_layers import BOTH, Given, clipped_mean
from tests.training.test_norms import forced

KINDS: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A convolution of any kind, which may be called twice, and a batch."""
    dimensions, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))

    def each(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * dimensions))

    kernel, dilation = each(1, 3), each(1, 2)
    padding: Any = draw(st.sampled_from([each(0, 2), "same", "valid"]))
    stride: Any = 1 if padding == "same" else each(1, 3)
    channels, images = (groups * draw(st.integers(1, 3)) for _ in range(2))
    layer = KINDS[dimensions - 1](
        channels, images, kernel, stride, padding, dilation, groups, draw(st.booleans()),
        draw(st.sampled_from(MODES)),
    )  # fmt: skip
    names = [name for name, _ in layer.named_parameters()]
    frozen = draw(st.sampled_from([None, *names[1:], *names[: len(names) - 1]]))
    if frozen:
        layer.get_parameter(frozen).requires_grad_(False)
    batch = torch.randn(draw(st.integers(1, 4)), channels, *each(5, 7))
    if draw(st.booleans()):
        batch = batch.transpose(1, -1).contiguous().transpose(1, -1)
    twice = draw(st.booleans()) and channels == images
    padded = nn.Sequential(layer, nn.Upsample(batch.shape[2:]), nn.Tanh(), layer)
    return padded if twice else nn.Sequential(layer), batch


@pytest.mark.parametrize("trainer", BOTH)
@pytest.mark.parametrize("way", [KEPT, PRODUCTS])
@settings(deadline=None)
@given(models(), st.sampled_from([1, 2**12, 2**28]))
def test_convolutions_move_by_the_mean_of_clipped_gradients(
    trainer: str, way: str, made: tuple[nn.Module, Tensor], at_once: int
) -> None:
    model, batch = made[0].double(), made[1].double()
    workload = Given(lambda: model, batch)
    expected, threshold = clipped_mean(workload, copy.deepcopy(model), batch)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": threshold}
    step = TRAINERS[trainer](
        model, batch_size=len(batch), workload=workload, learning_rate=1.0, **options
    )
    with forced(way), pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "BYTES_AT_ONCE", at_once)
        step.train_step(batch)
    after = [p for p in model.parameters() if p.requires_grad]
    for old, new, gradient in zip(before, after, expected, strict=True):
        # A factor is C / (norm + 1e-6).
        assert (old - new - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest memory that an operator has returned."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(returned):
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return returned


@pytest.mark.parametrize("channels", [4, 48])
def test_windows_of_the_input_are_not_kept(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input has 1/25 of the elements of its windows."""
    batch = torch.randn(32, channels, 12, 12)
    layers = [nn.Conv2d(channels, channels, 5, padding=2, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers)
    trainer = TRAINERS["fused"](model, batch_size=32, workload=Given(lambda: model, batch))
    trainer.train_step(batch)
    assert {*trainer.ways.values()} == {KEPT if channels == 4 else PRODUCTS}
    monkeypatch.setattr(convolutions, "BYTES_AT_ONCE", batch.nbytes)
    with Largest() as largest, trainer.without_parameter_gradients():
        (trainer.mean_loss(model, batch) * 32).backward()
        kept = [t for t in pytree.tree_leaves([*trainer.seen.values()]) if isinstance(t, Tensor)]
        assert sum(t.nbytes for t in kept) <= convolutions.MOST_KEPT * 3 * 2 * batch.nbytes
        for _ in trainer.clipped(last=True):
            pass
    assert largest.bytes <= 3 * batch.nbytes


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 10.0, 1e3]),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_norm_from_products_is_an_upper_bound_and_near_if_positions_differ(
    seed: int, dtype: torch.dtype, offset: float, stride: int, bias: bool
) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(5, 16, 3, stride, padding=1, bias=bias).double()
    x = (torch.randn(3, 5, 9, 8) + offset).to(dtype)
    g = torch.randn_like(layer(x.double())).to(dtype)
    g = g - g.mean((2, 3), keepdim=True) * bool(offset)
    samples = Examples.computed(
        layer,
        (x.double(), g.double()),
        lambda model, batch: (model(batch[0]) * batch[1]).flatten(1).sum(1),
    )
    norms, exact = GhostNorms(), samples.norms.norm(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SMALL", 0)
        norms.add_sums(*convolutions.sums_of_products(layer, [(x, g)], bias))
    found = total(norms.squared_norms()).double().sqrt()
    assert (found >= exact * (1 - 1e-7)).all()
    if not offset:
        assert (found <= exact * (1 + (5e-3 if dtype == torch.float32 else 0.02))).all()
