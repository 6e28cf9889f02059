"""``torch.autocast`` as it is for CUDA, on the fake ``cpu`` tensors of counting.

PyTorch casts the arguments of some operators, and for the CPU of other ones than for CUDA: CUDA's
layer norms are in single precision. Here CUDA's choice replaces the CPU's. Of the operators that
CUDA lists, those of `LOWER` run in the 16-bit type, and those of no list below in float32.

Source of the lists: ``aten/src/ATen/autocast_mode.h`` of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.amp import GradScaler, autocast
from torch.utils import _pytree as pytree

from dpbench.instruments.logical.rules import names

_aten = torch.ops.aten
_CPU = "AutocastCPU"
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

LOWER = names(
    """
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot linear
    matmul mm mv _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose prelu gru_cell
    lstm_cell rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)

WIDEST = names(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)
"""These run in the widest type of their arguments."""

SUMS = ("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "prod", "sum")
"""These read what they are given, and answer in float32."""

_NORMS: dict[OpOverload, tuple[OpOverload, tuple[Any, ...]]] = {
    _aten.norm.Scalar: (_aten.norm.ScalarOpt_dtype, (2,)),
    _aten.norm.ScalarOpt_dim: (_aten.norm.ScalarOpt_dim_dtype, (None, [], False)),
}
"""So do these, by another overload, which has no defaults."""

_SOFTMAX = {_aten.softmax.int: _aten._softmax, _aten.log_softmax.int: _aten._log_softmax}
"""And these, but that only float16 is read so; bfloat16 is cast before."""


class Casts:
    """What autocast makes of operators; each weight is cast once in a region."""

    def __init__(self) -> None:
        self.depth = 0
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def leave(self) -> None:
        """A region ends; with the outermost, what was kept for all of them."""
        self.depth -= 1
        if not self.depth:
            self._weights.clear()

    def run(self, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """What an operator does in a region."""
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            name, low = operator.overloadpacket.__name__, torch.get_autocast_dtype("cpu")
            if name in SUMS or operator in _NORMS or operator in _SOFTMAX:
                return _in_float32(operator, args, kwargs)
            dtype = low if name in LOWER else torch.float32
            if name in WIDEST:
                types = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _is_cast(t)}
                dtype = torch.float32 if torch.float32 in types else low
            args, kwargs = pytree.tree_map(partial(self._cast, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    def _cast(self, dtype: torch.dtype, value: Any) -> Any:
        if not _is_cast(value) or value.dtype is dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and not value._is_view()
        if dtype is torch.float32 or not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value, value.to(dtype)
        return self._weights[id(value)][1]


def _is_cast(value: Any) -> bool:
    """Whether autocast casts it, if it shall have another type."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_float32(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that is told to answer in float32, unless it was told something else."""
    told = kwargs.get("dtype") or (operator in _SOFTMAX and args[2:])
    if told or not _is_cast(args[0]):
        return operator(*args, **kwargs)
    if operator in _SOFTMAX and args[0].dtype is torch.float16:
        return _SOFTMAX[operator](*args[:2], True)
    if operator in _NORMS:
        operator, defaults = _NORMS[operator]
        args = (*args, *defaults[len(args) - 1 :])
    return operator(*args, **{**kwargs, "dtype": torch.float32})


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """In here regions of autocast, and scalers, are as on CUDA; each step of a scaler is finite."""
    casts, library = Casts(), torch.library.Library("aten", "IMPL")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    of_cuda, of_cpu = (  # those of other libraries, such as torchvision's, stay as they are
        {name for name in registered(f"Autocast{device}") if name.startswith("aten::")}
        for device in ("CUDA", "CPU")
    )
    begin: Any = autocast.__init__
    enter: Any = autocast.__enter__
    leave: Any = autocast.__exit__
    scale: Any = GradScaler.__init__

    def region(
        self: autocast, device_type: str, dtype: Any = None, *args: Any, **named: Any
    ) -> None:
        begin(self, "cpu", dtype or torch.float16, *args, **named)

    def entered(self: autocast) -> Any:
        casts.depth += 1
        return enter(self)

    def left(self: autocast, *error: Any) -> Any:
        casts.leave()
        return leave(self, *error)

    def scaler(self: GradScaler, device: str = "cuda", *args: Any, **named: Any) -> None:
        scale(self, "cpu", *args, **named)

    with ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():  # that these replace the CPU's
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in of_cuda:
                library.impl(_overload(name), partial(casts.run, _overload(name)), _CPU)
            for name in of_cpu - of_cuda:
                library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, _CPU)
        stack.enter_context(
            patch.multiple(autocast, __init__=region, __enter__=entered, __exit__=left)
        )
        stack.enter_context(patch.multiple(GradScaler, __init__=scaler, _maybe_opt_step=_step))
        yield


def _overload(name: str) -> OpOverload:
    """The operator of a name such as ``aten::sum.dim_IntList``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(_aten, packet), overload or "default")
    return found


def _step(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, state: object, *args: Any, **named: Any
) -> Any:
    """The optimizer's step, which a scaler would skip if gradients had overflowed."""
    return optimizer.step(*args, **named)
