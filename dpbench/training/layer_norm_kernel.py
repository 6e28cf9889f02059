"""An operator that computes per-sample gradients of a layer norm and reads its inputs once.

On a GPU the operator is a Triton kernel, on a CPU it consists of PyTorch operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from dpbench.training.kernels import triton_kernels


@custom_op("dpbench::layer_norm_samples", mutates_args=())
def layer_norm_samples(x: Tensor, g: Tensor, eps: float) -> Tensor:
    """Return the per-sample gradients of a layer norm's weight and bias, ``[2, B, H]``.

    The gradients are computed in float32, or in float64 for float64 inputs.

    Args:
        x: the layer's input, ``[B, T, H]``.
        g: the output gradient, ``[B, T, H]``.
        eps: the layer norm's epsilon.
    """
    return _layer_norm_samples(x, g, eps)


def _layer_norm_samples(x: Tensor, g: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], eps=eps)
    return torch.stack([(normal * g).sum(1), g.to(wide).sum(1)])


@layer_norm_samples.register_fake
def _(x: Tensor, g: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(2, len(x), x.shape[-1], dtype=wide)


@layer_norm_samples.register_kernel("cuda")
def _(x: Tensor, g: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float64:  # the kernel computes in float32
        return _layer_norm_samples(x, g, eps)
    examples, tokens, width = x.shape
    samples = torch.zeros(2, examples, width, device=x.device)
    triton_kernels()["layer_norm_samples"][examples, -(-tokens // 16)](
        x.contiguous(), g.contiguous(), samples[0], samples[1], tokens, width, eps, 16,
        1 << (width - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return samples
