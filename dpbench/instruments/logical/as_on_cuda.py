"""Lets a step on fake ``cpu`` tensors make the choices that PyTorch makes on CUDA.

Where bytes depend on the device, `as_on_cuda` chooses for CUDA. Nothing is left of it afterwards.
What it does about autocast is in `dpbench.instruments.logical.autocast`.

Dropout
    One operator (``native_dropout``) that keeps a mask of one byte an element.
RMSNorm
    One operator (``_fused_rms_norm``) that keeps the reciprocal root of each row, unless weight
    and input differ in dtype.
Attention (``scaled_dot_product_attention``)
    CUDA's flash kernel takes half precision, any number of key heads, values as wide as keys, and
    no mask; its memory-efficient kernel takes single precision, masks and other widths as well,
    but as many key as query heads. Both draw dropout again in backward and keep no mask of it.
    What neither takes is decomposed, here as there.
Optimizers
    ``foreach`` unless they were told otherwise: the bytes are the same, Adam's peak is not.
Transformers (Hugging Face)
    Its masks stay unmade where attention can be told ``is_causal``; for a fake tensor the library
    believes that it is being traced, and makes them.

What would change the bytes, and cannot be followed here, is refused: torch.compile, and shared
keys in the flash kernel before torch 2.9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer

from dpbench.instruments.logical.autocast import autocast_as_on_cuda
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

_aten = torch.ops.aten
_attention = _aten.scaled_dot_product_attention.default
_attention_as_products = _aten._scaled_dot_product_attention_math.default
_efficient_attention = _aten._scaled_dot_product_efficient_attention.default
_flash_attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_rms_norm = getattr(getattr(_aten, "_fused_rms_norm", None), "default", None)
"""None where torch has no such operator yet: CUDA decomposes RMSNorm there, too."""

WIDEST_FLASH_HEAD = 256


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """In here operators and modes choose as they do on CUDA, or say that they cannot."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        for operator, instead in INSTEAD.items():
            library.impl(operator, instead, "AutogradCPU")
        # With a kernel of its own the operator is recorded for backward in one piece.
        if _fused_rms_norm:
            library.impl(_fused_rms_norm, partial(_as_composed, _fused_rms_norm), "CPU")
        # Copying a fake tensor would copy its mode, whose tables do not survive that: Opacus
        # copies layers and gradients, and the process would end with a segmentation fault.
        replaced: list[tuple[Any, str, Any]] = [
            (FakeTensorMode, "__deepcopy__", lambda mode, memo: mode),
            (eval_frame, "_callback_from_stance", _refuse_compiled),
            (optimizer, "_foreach_supported_types", [FakeTensor, torch.nn.Parameter]),
            (optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
        ]
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value, create=True))
        stack.enter_context(autocast_as_on_cuda())
        yield


def untraced() -> AbstractContextManager[object]:
    """Let Hugging Face's transformers, if they are loaded, not take counting for tracing."""
    library = sys.modules.get("transformers.utils.import_utils")
    if library is None:
        return nullcontext()
    return patch.object(library, "is_fake_tensor", lambda tensor: False, create=True)


def _as_composed(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an operator is made of, as PyTorch's own C++ has it."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and input.numel():
        return _aten.native_dropout(input, p, train)[0]
    return _as_composed(_aten.dropout.default, input, p, train)


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    fits = not input.is_complex() and (weight is None or weight.dtype == input.dtype)
    if _fused_rms_norm and fits:
        return _fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return _as_composed(_aten.rms_norm.default, input, normalized_shape, weight, eps)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    width = query.shape[-1]
    same_width = width == value.shape[-1]
    same_heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    flash = attn_mask is None and same_width and half and width <= WIDEST_FLASH_HEAD
    efficient = same_heads and query.dtype is not torch.float64
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    operands = (query, key, value, attn_mask)
    if query.dim() != 4 or not (flash or efficient):
        return _as_composed(_attention_as_products, *operands, dropout_p, is_causal, **options)[0]
    if enable_gqa and not same_heads:  # as the CPU's fused kernel takes them as well, since 2.9
        if torch.__version__ < "2.9":
            raise UnsupportedOperation("shared keys in half precision are counted by torch >= 2.9")
        return _flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if same_width and (attn_mask is None or not attn_mask.requires_grad):
        # The CPU's fused kernel has the operands of CUDA's, if it need not drop anything.
        return _as_composed(_attention, *operands, 0.0, is_causal, **options)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # PyTorch on CUDA does the same
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
    return _efficient_attention(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


INSTEAD: dict[OpOverload, Callable[..., Any]] = {
    _aten.dropout.default: _dropout,
    _aten.rms_norm.default: _rms_norm,
    _attention: _scaled_dot_product_attention,
}
"""What runs for an operator that is made of others on the CPU and is one on CUDA."""


def _refuse_compiled(callback: Any) -> Any:
    if callback not in (None, False):
        raise UnsupportedOperation(
            "torch.compile fuses operators, whose bytes cannot be counted without running it; "
            "count the step uncompiled"
        )
    return callback
