"""How many floating-point operations an operator does.

Counted are products: of matrices and vectors, convolutions, recurrent layers, attention. A
multiply-add counts as two operations, and as eight if its numbers are complex. What an operator
does to each element by itself is not counted, and causal attention is not halved.

Convolutions
    Each of their two gradients takes as many operations as the forward pass, in groups as well.
    (PyTorch's formula multiplies the weight's by the groups, of which ``vmap`` makes one an
    example.) Products with padding count.
Recurrent layers
    Each token is multiplied by each of a layer's matrices. Backward takes twice as many: one
    product for the gradient of what goes in, one for that of the matrix.
Attention, operators of other libraries
    By PyTorch's formulas, or those that are registered there (`torch.utils.flop_counter`).

`is_unknown` finds operators that multiply and have no formula; notes name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry

from dpbench.instruments.logical.memory import tensors
from dpbench.instruments.logical.rules import KNOWN, arguments_of, operator_name

MULTIPLIES = re.compile(
    r"""
    (mm|mv|matmul)(_|$) | (^|_)v?dot(_|$) | ^addr | (?<!reorder_)conv(?!ert) | linear(_|$)
    | (rnn|lstm|gru)(?!_flatten|.*_cell) | attention(_|$) | transformer | ^_?fft_[cr]2[cr]
    | ^_?linalg_(?!vector_norm|_powsum|cross|check_errors) | cholesky | solve(_|$) | geqrf | ormqr
    | (^|_)[cp]dist_ | _euclidean_dist
    """,
    re.VERBOSE,
)
"""Matches names of PyTorch's operators that do more than a few operations for each element."""

Given = Mapping[str, Any]
"""The arguments of a call, by name."""


def flops(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: Given, out: Any
) -> int:
    """The operations of a finished call; 0 if it has no formula."""
    formula = formula_of(func)
    if formula is None:
        return 0
    operations = int(formula(*_with_own_keys(func, args), **kwargs, out_val=out))
    return operations * (4 if any(tensor.is_complex() for tensor in tensors(args)) else 1)


@cache
def is_unknown(func: OpOverload | HigherOrderOperator) -> bool:
    """Whether an operator multiplies, as far as its name tells, and has no formula."""
    if formula_of(func):
        return False
    if isinstance(func, HigherOrderOperator) or func.namespace != "aten":
        return func.namespace not in KNOWN  # those multiply nothing unless they have a formula
    return MULTIPLIES.search(operator_name(func)) is not None


@cache
def formula_of(func: OpOverload | HigherOrderOperator) -> Callable[..., int] | None:
    """An operator's formula, which takes its arguments and ``out_val``, what it returned."""
    if isinstance(func, HigherOrderOperator):
        return flop_registry.get(func)
    name = operator_name(func).removesuffix("_")
    for pattern, formula in FORMULAS.items():
        if re.fullmatch(pattern, name):
            return partial(_by_name, func, formula)
    # The CPU's fused attention takes its operands in the same order as CUDA's.
    name = str(func.overloadpacket).replace("_for_cpu", "")
    return next((formula for known, formula in flop_registry.items() if str(known) == name), None)


def _by_name(
    func: OpOverload, formula: Callable[[Given, Any], int], *args: Any, out_val: Any, **kwargs: Any
) -> int:
    return formula(arguments_of(func, args, kwargs), out_val)


def _with_own_keys(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of attention as shapes, with keys for each query head: as much arithmetic.

    Before 2.12 PyTorch's formulas refuse keys that several heads share.
    """
    if "scaled_dot_product" not in str(func):
        return args
    heads = args[0].shape[1]  # of the query, or in backward of the output's gradient

    def shape(value: Any) -> Any:
        return (value.shape[0], heads, *value.shape[2:]) if isinstance(value, Tensor) else value

    return *map(shape, args[:4]), *args[4:]


def _product(left: Tensor, right: Tensor) -> int:
    """Of matrices, of batches of them, or of vectors."""
    packed = 2 if left.dtype is torch.float4_e2m1fn_x2 else 1
    return 2 * packed * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _product_of_groups(given: Given, out: Any) -> int:
    left, right = given["self"], given["mat2"]
    # A matrix on the right is cut by columns: each group has its own.
    return _product(left, right) // (left.shape[0] if left.dim() > right.dim() else 1)


def _convolution(given: Given, out: Any) -> int:
    source, weight = given.get("input", given.get("self")), given["weight"]
    spread = source if given.get("transposed") else given.get("grad_output", out)
    gradients = given.get("output_mask", [True, False])[:2]  # one product in forward
    return int(2 * sum(gradients) * spread.numel() * weight[0].numel())


def _recurrent(given: Given, out: Any) -> int:
    weights = [value for name, value in given.items() if name.startswith("weight")]
    elements = sum(each.numel() for each in tensors(weights) if each.dim() == 2)
    tokens = given["input"].shape[:-1].numel()
    backward = "output" in given  # of which ``output_mask`` may leave out the weights' gradients
    return int(2 * (1 + (backward and given.get("output_mask", [True])[-1])) * tokens * elements)


FORMULAS: Mapping[str, Callable[[Given, Any], int]] = {
    r"b?mm|mv|v?dot|_int_mm|_scaled_mm(_v2)?": lambda g, out: _product(*[*g.values()][:2]),
    r"b?add(b?mm|mv)|_addmm_activation": lambda g, out: _product(*[*g.values()][1:3]),
    r"addr": lambda given, out: 2 * out.numel(),
    r"_foreach_mm": lambda given, out: sum(map(_product, given["self"], given["mat2"])),
    r"_(scaled_)?grouped_mm(_v2)?": _product_of_groups,
    r"(_|cudnn_|miopen_|mkldnn_)?convolution(_backward)?(_overrideable)?": _convolution,
    r"(_cudnn_rnn|miopen_rnn|mkldnn_rnn_layer)(_backward)?": _recurrent,
}
"""By names of ATen's operators."""
