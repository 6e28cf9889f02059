"""Computes how many floating-point operations (FLOPs) an operator executes.

Only products are counted: products of matrices and vectors, convolutions, recurrent layers, and
attention. A multiply-add is two operations, or eight on complex numbers. Elementwise work is not
counted. The count of causal attention equals the count of attention without a mask.

Convolutions
    The gradients of the input and of the weight each need as many FLOPs as forward, also with
    groups. PyTorch's own formula is not used, because it multiplies the FLOPs of the weight's
    gradient by the number of groups. ``vmap`` makes a group of each example, so PyTorch's
    result would be too large. Multiplications by the zeros of the padding are counted.
Recurrent layers
    Each token is multiplied by each matrix of the layer. Backward executes two products for each
    product of forward: one for the gradient of the input, and one for the gradient of the matrix.
    If the gradients of the matrices are not requested, backward executes only the first product.
Attention and operators of other libraries
    PyTorch's formulas and the formulas that are registered with `torch.utils.flop_counter` apply.

`lacks_formula` finds operators that may multiply but have no formula. The notes of a run
name these operators if the step runs them.
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
"""Matches the names of ATen operators that multiply, such as solvers and Fourier transforms."""

Arguments = Mapping[str, Any]
"""Arguments of a call, by name."""


def flops(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: Arguments, out: Any
) -> int:
    """Return the FLOPs of a call with the result ``out``, or 0 if the operator has no formula."""
    formula = formula_of(func)
    if formula is None:
        return 0
    operations = int(formula(*_with_repeated_keys(func, args), **kwargs, out_val=out))
    return operations * (4 if any(tensor.is_complex() for tensor in tensors(args)) else 1)


@cache
def lacks_formula(func: OpOverload | HigherOrderOperator) -> bool:
    """Return True if an operator may multiply but has no FLOP formula.

    An ATen operator multiplies if `MULTIPLIES` matches its name. Any operator of an unknown library
    may multiply.
    """
    if formula_of(func):
        return False
    if isinstance(func, HigherOrderOperator) or func.namespace != "aten":
        return func.namespace not in KNOWN  # in known libraries, each product has a formula
    return MULTIPLIES.search(operator_name(func)) is not None


@cache
def formula_of(func: OpOverload | HigherOrderOperator) -> Callable[..., int] | None:
    """Return the FLOP formula of an operator, or None.

    The formula takes the arguments of the call, and the result as ``out_val``.
    """
    if isinstance(func, HigherOrderOperator):
        return flop_registry.get(func)
    name = operator_name(func).removesuffix("_")
    for pattern, formula in FORMULAS.items():
        if re.fullmatch(pattern, name):
            return partial(_by_name, func, formula)
    # Fused attention on the CPU takes its operands in the same order as on CUDA.
    name = str(func.overloadpacket).replace("_for_cpu", "")
    return next((formula for known, formula in flop_registry.items() if str(known) == name), None)


def _by_name(
    func: OpOverload,
    formula: Callable[[Arguments, Any], int],
    *args: Any,
    out_val: Any,
    **kwargs: Any,
) -> int:
    return formula(arguments_of(func, args, kwargs), out_val)


def _with_repeated_keys(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of attention, with shapes instead of operands.

    In these shapes, each query head has its own key head, which does not change the FLOPs. The
    formulas of PyTorch before 2.12 refuse operands in which several query heads share a key head.
    The arguments of other operators are returned unchanged.
    """
    if "scaled_dot_product" not in str(func):
        return args
    heads = args[0].shape[1]  # heads of the query; in backward, heads of the output's gradient

    def shape(value: Any) -> Any:
        return (value.shape[0], heads, *value.shape[2:]) if isinstance(value, Tensor) else value

    return *map(shape, args[:4]), *args[4:]


def _product(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of a product of matrices, batches of matrices, or vectors."""
    packed = 2 if left.dtype is torch.float4_e2m1fn_x2 else 1
    return 2 * packed * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _product_of_groups(given: Arguments, out: Any) -> int:
    left, right = given["self"], given["mat2"]
    # If the groups share the right matrix, each group multiplies only some columns of it.
    return _product(left, right) // (left.shape[0] if left.dim() > right.dim() else 1)


def _convolution(given: Arguments, out: Any) -> int:
    source, weight = given.get("input", given.get("self")), given["weight"]
    spread = source if given.get("transposed") else given.get("grad_output", out)
    gradients = given.get("output_mask", [True, False])[:2]  # forward executes one product
    return int(2 * sum(gradients) * spread.numel() * weight[0].numel())


def _recurrent(given: Arguments, out: Any) -> int:
    weights = [value for name, value in given.items() if name.startswith("weight")]
    elements = sum(each.numel() for each in tensors(weights) if each.dim() == 2)
    tokens = given["input"].shape[:-1].numel()
    backward = "output" in given  # `output_mask` may omit the gradients of the weights
    return int(2 * (1 + (backward and given.get("output_mask", [True])[-1])) * tokens * elements)


FORMULAS: Mapping[str, Callable[[Arguments, Any], int]] = {
    r"b?mm|mv|v?dot|_int_mm|_scaled_mm(_v2)?": lambda g, out: _product(*[*g.values()][:2]),
    r"b?add(b?mm|mv)|_addmm_activation": lambda g, out: _product(*[*g.values()][1:3]),
    r"addr": lambda given, out: 2 * out.numel(),
    r"_foreach_mm": lambda given, out: sum(map(_product, given["self"], given["mat2"])),
    r"_(scaled_)?grouped_mm(_v2)?": _product_of_groups,
    r"(_|cudnn_|miopen_|mkldnn_)?convolution(_backward)?(_overrideable)?": _convolution,
    r"(_cudnn_rnn|miopen_rnn|mkldnn_rnn_layer)(_backward)?": _recurrent,
}
"""FLOP formulas of ATen operators, by a pattern of the operator's name."""
