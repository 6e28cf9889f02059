"""Computes the cost of an operator call: bytes moved, FLOPs, and bytes sent to other ranks.

`rules` computes the bytes. Of floating-point operations (FLOPs), only those of products are
counted: products of matrices and vectors, convolutions, recurrent layers, and attention. A
multiply-add is two operations, or eight on complex numbers. Elementwise work is not counted. The
count of causal attention equals the count of attention without a mask.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry

from dpbench.instruments.logical import rules
from dpbench.instruments.logical.memory import data_tensors, is_wrapper, region_of, tensors
from dpbench.instruments.logical.rules import KNOWN, arguments_of, operator_name, sent_bytes
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

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


class Cost(NamedTuple):
    """The cost of an operator call.

    Attributes:
        read_bytes: bytes that the operator reads.
        write_bytes: bytes that the operator writes.
        flops: number of floating-point operations.
        collective_bytes: bytes that this rank sends to other ranks.
        dtype: dtype of the first floating-point operand, or "" if the call has no FLOPs or no
            floating-point operand.
    """

    read_bytes: int
    write_bytes: int
    flops: int
    collective_bytes: int
    dtype: str = ""


def cost(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Cost:
    """Return the cost of a call with the result ``out``.

    An operator that takes functions as arguments, such as ``flex_attention``, is counted by the
    general rule of `rules`, because torch.compile makes one kernel from the operator. If the
    operator has no FLOP formula, an error is raised.
    """
    if isinstance(func, HigherOrderOperator):
        if lacks_formula(func):
            raise UnsupportedOperation("the operator calls functions that are not counted")
        sizes = ({*map(region_of, tensors(value))} for value in ((args, *kwargs.values()), out))
        read, written = (sum(size for _, size in regions) for regions in sizes)
        return Cost(read, written, flops(func, args, kwargs, out), 0, _dtype(args))
    moved = rules.bytes_moved(func, args, kwargs, out)
    crossed = sent_bytes(rules.operator_name(func), rules.arguments_of(func, args, kwargs), out)
    operations = flops(func, args, kwargs, out)
    return Cost(*moved, operations, crossed, _dtype(args) if operations else "")


def cost_by_subclass(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Cost:
    """Return the cost of a call that a tensor subclass ran without operators that were received.

    Raises:
        UnsupportedOperation: the result has new data, but its tensors have no memory of their own.
    """
    used, made = [*tensors([*args, *kwargs.values()])], [*tensors(out)]
    if not any(map(is_wrapper, (*used, *made))):
        return cost(func, args, kwargs, out)
    old, new = ({id(t) for each in all_ for t in data_tensors(each)} for all_ in (used, made))
    if new - old and not rules.is_free(func):
        raise UnsupportedOperation("a subclass of Tensor ran operators that were not seen")
    return Cost(0, 0, 0, 0)


def _dtype(args: Any) -> str:
    """Return the name of the dtype of the first floating-point operand, such as ``float32``."""
    operands = (each for each in tensors(args) if each.is_floating_point())
    return str(next((each.dtype for each in operands), "")).removeprefix("torch.")
