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

`is_unknown` says which operators multiply and have no formula, for a reader to be told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry

from dpbench.instruments.logical.collectives import NAMESPACES as BETWEEN_RANKS
from dpbench.instruments.logical.regions import tensors
from dpbench.instruments.logical.rules import arguments_of, is_free, names, operator_name

OF_TWO = names("mm bmm mv dot vdot _int_mm _scaled_mm _scaled_mm_v2")
"""Products of an operator's first two arguments."""

ADDED = names("addmm addmv addbmm baddbmm _addmm_activation")
"""Products of the second and third argument, which are added to the first."""

GROUPED = names("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2")
"""Products of groups: a matrix is cut into those of its rows or columns that belong together."""

CONVOLUTIONS = names(
    """
    convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu
    cudnn_convolution_add_relu cudnn_convolution_transpose mkldnn_convolution miopen_convolution
    miopen_convolution_relu miopen_convolution_add_relu miopen_convolution_transpose
    miopen_depthwise_convolution _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
    slow_conv_transpose3d
    """
)
"""Their first two arguments are the input and the weight."""

RECURRENT = re.compile("(_cudnn_rnn|miopen_rnn|mkldnn_rnn_layer)(_backward)?")

MULTIPLIES = re.compile(
    r"""
    (mm|mv|matmul)(_|$) | (^|_)v?dot(_|$) | ^addr | (?<!reorder_)conv(?!ert) | linear(_|$)
    | (rnn|lstm|gru)(?!_flatten|.*_cell) | attention(_|$) | transformer | ^_?fft_[cr]2[cr]
    | ^_?linalg_(?!vector_norm|_powsum|cross|check_errors) | cholesky | solve(_|$) | geqrf | ormqr
    | (^|_)[cp]dist_ | _euclidean_dist
    """,
    re.VERBOSE,
)
"""What the names of PyTorch's operators have in them whose arithmetic is more than a few
operations an element."""

ELEMENTWISE = ("dpbench", "fsdp", *BETWEEN_RANKS)
"""Libraries whose operators multiply nothing unless they have a formula."""

Given = Mapping[str, Any]


def flops(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: Given, out: Any
) -> int:
    """The operations of a finished call; 0 if it has no formula."""
    formula = formula_of(func)
    if formula is None:
        return 0
    operations = int(formula(*args, **kwargs, out_val=out))
    return operations * (4 if any(tensor.is_complex() for tensor in tensors(args)) else 1)


@cache
def is_unknown(func: OpOverload | HigherOrderOperator) -> bool:
    """Whether an operator multiplies, as far as its name tells, and has no formula."""
    if formula_of(func) or isinstance(func, HigherOrderOperator):
        return not formula_of(func)
    if func.namespace != "aten":
        return func.namespace not in ELEMENTWISE and not is_free(func)
    return MULTIPLIES.search(operator_name(func)) is not None


@cache
def formula_of(func: OpOverload | HigherOrderOperator) -> Callable[..., int] | None:
    """An operator's formula, which takes its arguments and ``out_val``, what it returned."""
    if isinstance(func, HigherOrderOperator):
        return flop_registry.get(func)
    # The CPU's fused attention takes its operands in the same order as CUDA's.
    name = str(func.overloadpacket).replace("_for_cpu", "")
    by_torch = next((each for known, each in flop_registry.items() if str(known) == name), None)
    formula = _own(operator_name(func))
    if formula is None:
        return by_torch and (_with_own_keys(by_torch) if "scaled_dot" in name else by_torch)

    def of_arguments(*args: Any, out_val: Any, **kwargs: Any) -> int:
        return formula(arguments_of(func, args, kwargs), out_val)

    return of_arguments


def _own(name: str) -> Callable[[Given, Any], int] | None:
    """The formula for an ATen operator, of its arguments by name and what it returned."""
    base = name.removesuffix("_")
    if base in OF_TWO:
        return lambda given, out: _product(*[*given.values()][:2])
    if base in ADDED:
        return lambda given, out: _product(*[*given.values()][1:3])
    if base == "addr":
        return lambda given, out: 2 * out.numel()
    if base == "_foreach_mm":
        return lambda given, out: sum(map(_product, given["self"], given["mat2"]))
    if base in GROUPED:
        return _product_of_groups
    if base in CONVOLUTIONS:
        turned = "transpose" in base
        return lambda given, out: _convolution(*[*given.values()][:2], out, given, turned)
    if base in ("convolution_backward", "convolution_backward_overrideable"):
        return _convolution_backward
    if base in ("conv_tbc", "conv_tbc_backward"):
        return _convolution_in_time
    if RECURRENT.fullmatch(base):
        return _recurrent if base.endswith("_backward") else lambda g, out: _recurrent(g, out) // 2
    return _trilinear if base == "_trilinear" else None


def _product(left: Tensor, right: Tensor) -> int:
    """Of matrices, of batches of them, or of vectors."""
    packed = 2 if left.dtype is getattr(torch, "float4_e2m1fn_x2", None) else 1
    return 2 * packed * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _product_of_groups(given: Given, out: Any) -> int:
    left, right = given["self"], given["mat2"]
    every = _product(left, right)  # also of rows and columns of different groups, in one case
    return every // left.shape[0] if left.dim() > right.dim() else every


def _convolution(source: Tensor, weight: Tensor, out: Tensor, given: Given, turned: bool) -> int:
    spread = source if turned or given.get("transposed") else out
    return 2 * spread.numel() * weight[0].numel()  # (channels, channels of a group, *kernel)


def _convolution_backward(given: Given, out: Any) -> int:
    source, weight, output = given["input"], given["weight"], given["grad_output"]
    return sum(given["output_mask"][:2]) * _convolution(source, weight, output, given, False)


def _convolution_in_time(given: Given, out: Any) -> int:
    weight = given["weight"]  # (kernel, channels in, channels out)
    if "input" in given:  # backward, whose ``self`` is the output's gradient
        return 4 * given["self"].shape[:2].numel() * weight.numel()
    return int(2 * out.shape[:2].numel() * weight.numel())


def _recurrent(given: Given, out: Any) -> int:
    """Of backward, twice that of forward unless the weights' gradients are not asked for."""
    matrices = [
        each
        for name, value in given.items()
        if name.startswith("weight")
        for each in tensors(value)
        if each.dim() == 2
    ]
    products = 1 + bool(given.get("output_mask", [True])[-1])
    tokens = given["input"].numel() // given["input"].shape[-1]
    return 2 * products * tokens * sum(matrix.numel() for matrix in matrices)


def _trilinear(given: Given, out: Any) -> int:
    """Of ``nn.Bilinear``: the first two operands are multiplied, and what comes of it with the third.

    Each product is summed over the dimensions that no later one has, but for the one that is
    gone through step by step; where nothing is summed it is elementwise. Source:
    ``aten/src/ATen/native/Linear.cpp``.
    """
    total = given["i1"].dim() + len(given["expand1"])
    spread = []
    for which in "123":
        sizes, expanded = iter(given[f"i{which}"].shape), given[f"expand{which}"]
        spread.append([1 if dim in expanded else next(sizes) for dim in range(total)])
    unrolled = given.get("unroll_dim", 1)
    summed = {*given["sumdim"]} - {unrolled}
    early, late = summed & {*given["expand3"]}, summed - {*given["expand3"]}
    sizes = [max(each) for each in zip(*spread, strict=True)]
    of_two = [max(each) for each in zip(*spread[:2], strict=True)]
    of_two[unrolled] = sizes[unrolled]
    rest = math.prod(size for dim, size in enumerate(sizes) if dim not in early)
    return 2 * (math.prod(of_two) * bool(early) + rest * bool(late))


def _with_own_keys(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula for attention that is given a key for each head, which computes as much.

    PyTorch's refuse keys that several heads share before 2.12.
    """

    def of_shapes(*args: Any, **kwargs: Any) -> int:
        heads = args[0].shape[1]  # of the query, or in backward of the output's gradient

        def shape(value: Any) -> Any:
            own = isinstance(value, Tensor)
            return (value.shape[0], heads, *value.shape[2:]) if own else value

        return formula(*map(shape, args[:4]), *args[4:], **kwargs)

    return of_shapes
