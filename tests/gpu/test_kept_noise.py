"""Noise that is kept in memory, added by the kernel: held to PyTorch's formulas."""

from __future__ import annotations

import pytest
import torch

from dpbench.training.kept_noise import add_banded, add_buffered

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]

TYPES = [(torch.bfloat16, 1e-2), (torch.float32, 1e-6), (torch.float64, 1e-14)]


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("dtype", "off"), TYPES)
@pytest.mark.parametrize("rows", [1, 3, 31])
@pytest.mark.parametrize("length", [1, 1025, 10_000])
def test_the_kernel_computes_what_pytorch_does(
    length: int, rows: int, dtype: torch.dtype, off: float, buffered: bool
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.randn(length, dtype=dtype, device="cuda")
    z, kept, weights, decays = (
        torch.randn(shape, dtype=wide, device="cuda")
        for shape in ((length,), (rows, length), (1 + rows,), (rows,))
    )
    ours, theirs = (
        [each.to(device, copy=True) for each in (total, z, kept, weights)]
        for device in ("cuda", "cpu")
    )
    for each in (ours, theirs):
        if buffered:
            add_buffered(*each, decays.to(each[0].device))
        else:
            add_banded(*each, out=each[2][rows // 2])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=off, atol=10 * off)
