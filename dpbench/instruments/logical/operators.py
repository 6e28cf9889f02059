"""Finds properties of PyTorch's operators and their calls, such as names and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from dpbench.instruments.logical.stand_ins import UnsupportedOperation

FUSED_ON_CUDA = ("aten._fused_rms_norm", "aten.mish_backward", "aten.silu_backward")
"""Operators that are one kernel on CUDA, and composed of several operators elsewhere."""


@cache
def label(func: Any) -> str:
    """Return the name of an operator without its overload, such as ``aten.clone``."""
    return str(func.name()).partition(".")[0].replace("::", ".")


@cache
def is_composite(func: OpOverload) -> bool:
    """Return True if an ATen operator only calls other operators, which are counted instead."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func.namespace == "aten"
        and label(func) not in FUSED_ON_CUDA
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    )


def have_own_operators(types: Iterable[Any]) -> bool:
    """Return True if an argument is of a tensor subclass that runs other operators instead.

    Examples are a ``DTensor``, a nested tensor and a quantized weight.
    """
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        kind.__torch_dispatch__ is not plain and kind not in (FakeTensor, FunctionalTensor)
        for kind in types
    )


def device_of(func: OpOverload, kwargs: Mapping[str, Any]) -> str:
    """Return the device type that a call requests for its result, ``cpu`` or ``meta``.

    Without a request, returns ``cpu``. Other devices raise an error, because tensors on these
    devices could end the process (see `counter`).
    """
    device = kwargs.get("device")
    asked = "cpu" if device is None else torch.device(device).type
    if asked not in ("cpu", "meta"):
        raise UnsupportedOperation(
            f"{label(func)} creates a tensor on device {str(device)!r}, but the step is counted "
            f"without hardware: use the device of the batch or of the model"
        )
    return asked
