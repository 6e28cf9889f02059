"""Makes PyTorch choose the same operators for fake ``cpu`` tensors as for CUDA tensors.

`as_on_cuda` changes the parts of PyTorch that affect counted bytes, and restores these parts
afterwards.

Dropout
    CUDA runs one operator, ``native_dropout``, which stores a mask of one byte per element.
RMSNorm
    CUDA runs one operator, ``_fused_rms_norm``, which stores one number per row for backward. If
    weight and input have different dtypes, or the input is complex, CUDA runs several operators
    instead.
Attention (``scaled_dot_product_attention``)
    CUDA's flash kernel supports half precision, heads of at most 256 elements, and fewer key heads
    than query heads. The flash kernel supports no mask, and values must be as wide as keys. The
    memory-efficient kernel also supports single precision, masks and other widths, but needs as
    many key heads as query heads. The two kernels store no dropout mask, because backward draws the
    same random numbers again. If neither kernel supports the arguments, attention is decomposed
    into several operators, as on CUDA. ``flex_attention`` counts as one kernel in forward and one
    kernel in backward, as under torch.compile.
Optimizers and clipping
    Optimizers and PyTorch's gradient clipping use ``foreach`` operators by default, as on CUDA.
    With these operators, Adam has another peak memory than with a loop over the parameters, and
    clipping by value makes two passes over the gradients.
Autocast
    CUDA and the CPU cast the arguments of different operators. For example, CUDA runs layer norms
    in float32. Of the operators that CUDA casts, the operators in `LOWER` run in the 16-bit dtype,
    and the operators in none of this module's lists run in float32. Operators that the CPU also
    runs in 16 bits keep PyTorch's own cast, which casts each weight once per autocast region. A
    gradient scaler never skips an optimizer step, because gradients without values cannot overflow.
    The lists come from ``aten/src/ATen/autocast_mode.h`` of PyTorch.
Transformers (Hugging Face)
    The library creates no mask if attention accepts ``is_causal``. With a fake tensor the library
    assumes that the model is traced, and creates a mask. `untraced` prevents this mask.

A step that uses torch.compile raises an error, because the bytes of fused operators are unknown.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._library.utils import lookup_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler, autocast
from torch.nn.attention import flex_attention
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

from dpbench.instruments.logical.rules import names
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

_aten = torch.ops.aten
_attention = _aten.scaled_dot_product_attention.default
_attention_as_products = _aten._scaled_dot_product_attention_math.default
_efficient_attention = _aten._scaled_dot_product_efficient_attention.default
_flash_attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_rms_norm = _aten._fused_rms_norm.default

WIDEST_FLASH_HEAD = 256


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Choose operators and casts as on CUDA within the block.

    Within the block, code that uses torch.compile raises an error.
    """
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        for operator, instead in CUDA_REPLACEMENTS.items():
            library.impl(operator, instead, "AutogradCPU")
        # With a registered kernel, autograd records one operator and not its parts.
        library.impl(_fused_rms_norm, partial(_as_composed, _fused_rms_norm), "CPU")
        # Opacus deep-copies layers and gradients. A copied `FakeTensorMode` crashes the process.
        replaced: list[tuple[Any, str, Any]] = [
            (FakeTensorMode, "__deepcopy__", lambda mode, memo: mode),
            (eval_frame, "_callback_from_stance", _refuse_compiled),
            (
                optimizer,
                "_foreach_supported_types",
                [FakeTensor, *optimizer._foreach_supported_types],
            ),
            (optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            (autocast, "__init__", _begin_region),
            (GradScaler, "__init__", _make_scaler),
            (GradScaler, "_maybe_opt_step", _step),
            (
                _foreach_utils,
                "_foreach_supported_types",
                [FakeTensor, *_foreach_utils._foreach_supported_types],
            ),
            (flex_attention, "_validate_device", lambda *operands: None),
            (flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        ]
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value, create=True))
        _cast_as_on_cuda(library)
        # PyTorch caches cast weights until the outermost autocast region ends. Regions around the
        # block are hidden within the block, so that the cache is cleared.
        around = torch.autocast_increment_nesting() - 1
        for _ in range(around + 1):
            torch.autocast_decrement_nesting()
        for _ in range(around):
            stack.callback(torch.autocast_increment_nesting)
        yield


def untraced() -> AbstractContextManager[object]:
    """Return a context manager in which Hugging Face's transformers ignores fake tensors.

    Without this context manager, transformers assumes that the model is traced.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if library is None:
        return nullcontext()
    return patch.object(library, "is_fake_tensor", lambda tensor: False, create=True)


def _as_composed(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as the composition of operators that PyTorch's C++ code defines."""
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
    if fits:
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
    if enable_gqa and not same_heads:  # the CPU's fused kernel also supports fewer key heads
        return _flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if same_width and (attn_mask is None or not attn_mask.requires_grad):
        # Without dropout, the CPU's fused kernel has the same operands as CUDA's kernel.
        return _as_composed(_attention, *operands, 0.0, is_causal, **options)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # PyTorch does the same on CUDA
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
    return _efficient_attention(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


CUDA_REPLACEMENTS: dict[OpOverload, Callable[..., Any]] = {
    _aten.dropout.default: _dropout,
    _aten.rms_norm.default: _rms_norm,
    _attention: _scaled_dot_product_attention,
}
"""For each replaced operator, a function that runs the operators which PyTorch runs on CUDA."""


def _refuse_compiled(callback: Any) -> Any:
    if callback not in (None, False):
        raise UnsupportedOperation(
            "the step uses torch.compile, but the bytes of fused operators cannot be counted: "
            "count the step without torch.compile"
        )
    return callback


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

LOWER = names(
    """
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot linear
    matmul mm mv _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose prelu gru_cell
    lstm_cell rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
"""Operators that run in the 16-bit dtype of an autocast region."""

WIDEST = names(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)
"""Operators that run in float32 if an argument is float32, otherwise in the 16-bit dtype."""

SUMS = ("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "prod", "sum")
"""Operators that do not cast their argument, but return float32."""

_NORMS: dict[OpOverload, tuple[OpOverload, tuple[Any, ...]]] = {
    _aten.norm.Scalar: (_aten.norm.ScalarOpt_dtype, (2,)),
    _aten.norm.ScalarOpt_dim: (_aten.norm.ScalarOpt_dim_dtype, (None, [], False)),
}
"""Norms that return float32. Each norm has another overload, which takes a dtype.

The tuple contains values of the arguments for which this overload has no defaults.
"""

_SOFTMAX = {_aten.softmax.int: _aten._softmax, _aten.log_softmax.int: _aten._log_softmax}
"""For each softmax operator, the operator that reads float16 and returns float32.

A bfloat16 argument is first cast to float32.
"""


def _in_region(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator in an autocast region with the same casts as on CUDA."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        name, low = operator.overloadpacket.__name__, torch.get_autocast_dtype("cpu")
        if name in SUMS or operator in _NORMS or operator in _SOFTMAX:
            return _in_float32(operator, args, kwargs)
        dtype = low if name in LOWER else torch.float32
        if name in WIDEST:
            types = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _is_cast(t)}
            dtype = torch.float32 if torch.float32 in types else low
        args, kwargs = pytree.tree_map(
            lambda value: value.to(dtype) if _is_cast(value) else value, (args, kwargs)
        )
        return operator(*args, **kwargs)


def _is_cast(value: Any) -> bool:
    """Return True if autocast casts a value: a floating-point tensor that is not float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_float32(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with ``dtype=float32``.

    If the caller passed a dtype, or autocast does not cast the argument, the call is unchanged.
    """
    told = kwargs.get("dtype") or (operator in _SOFTMAX and args[2:])
    if told or not _is_cast(args[0]):
        return operator(*args, **kwargs)
    if operator in _SOFTMAX and args[0].dtype is torch.float16:
        return _SOFTMAX[operator](*args[:2], True)
    if operator in _NORMS:
        operator, defaults = _NORMS[operator]
        args = (*args, *defaults[len(args) - 1 :])
    return operator(*args, **{**kwargs, "dtype": torch.float32})


def _cast_as_on_cuda(library: torch.library.Library) -> None:
    """Register CUDA's casts for operators in autocast regions."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    of_cuda, of_cpu = (  # operators of other libraries, such as torchvision, keep their casts
        {lookup_op(name) for name in registered(f"Autocast{device}") if name.startswith("aten::")}
        for device in ("CUDA", "CPU")
    )
    same = {operator for operator in of_cuda & of_cpu if operator.overloadpacket.__name__ in LOWER}
    with warnings.catch_warnings():  # PyTorch warns that these casts replace those of the CPU
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for operator in of_cuda - same:
            library.impl(operator, partial(_in_region, operator), "AutocastCPU")
        for operator in of_cpu - of_cuda:
            library.impl(operator, torch.library.fallthrough_kernel, "AutocastCPU")


_region: Any = autocast.__init__
_scaler: Any = GradScaler.__init__


def _begin_region(
    self: autocast, device_type: str, dtype: Any = None, *args: Any, **named: Any
) -> None:
    _region(self, "cpu", dtype or torch.float16, *args, **named)


def _make_scaler(self: GradScaler, device: str = "cuda", *args: Any, **named: Any) -> None:
    _scaler(self, "cpu", *args, **named)


def _step(self: GradScaler, optimizer: Any, state: object, *args: Any, **named: Any) -> Any:
    return optimizer.step(*args, **named)  # the replaced method would first check for overflow
