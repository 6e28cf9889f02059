"""Computes how many bytes one ATen operator must read and write, and states the rules.

The count is a floor. It assumes an ideal execution: one operator after another, no cache that
outlives an operator, and no byte fetched twice within an operator. A real GPU moves more where a
kernel reads operands again (large matrix products), and less where the next operator finds a tensor
in the L2 cache.

The general rule
    Each distinct memory region among the inputs is read once. Each output, and each argument that
    the schema marks as mutated, is written once. A region is the set of addressed bytes:
    ``bmm(g, g.mT)`` reads ``g`` once. A stride-0 (expanded) dimension counts once, and overlapping
    strides count at most the span that they cover. In-place operators read and write their target.
    Tensors in lists (``_foreach_*``, ``cat``) count one by one.

Free
    Views, ``detach``, ``alias`` and ``_unsafe_view`` touch metadata only. Allocation (``empty*``,
    ``resize_``, ``set_``) writes nothing. An argument that is returned unchanged is not written.

Not read
    The target of a pure overwriter (``copy_``, ``fill_``, ``zero_``, random ``normal_`` …) and
    every ``out=`` argument, whose old content cannot matter. Arguments that only give a shape: of
    ``zeros_like`` and its kin, and of some backward formulas (logits in ``nll_loss_backward``), see
    `SHAPE_OF_SELF`. The summand of a product with ``beta=0``.

Not written
    Gradients in ``_fused_*`` optimizers without ``grad_scale``, although schemas mark them as
    mutable.

Not asked for
    A gradient that ``output_mask`` leaves out is not written, and arguments that only this gradient
    needs are not read, see `MADE_OF`. The backward of a first convolution does not read the weight.

Batch norm
    Training also reads and writes the running statistics; its backward reads those of the batch.
    Evaluation and its backward read the running statistics.

Gathers
    ``embedding``, ``index_select``, ``gather`` and indexing read as many bytes of the source as
    they return, at most all of it. A bag of embeddings reads one row per index, and
    ``nll_loss_forward`` one logit per target.

Scatters in place
    ``scatter_*``, ``index_add_``, ``index_put_`` … write only the elements that indices name, at
    most the whole target, and read them only to accumulate. Their out-of-place forms return a whole
    new tensor and follow the general rule. So does ``embedding_dense_backward``, which writes the
    whole weight gradient with its zeros.

Fused kernels
    Attention and the kernels of dpbench's trainers (``dpbench::``) follow the general rule.
    Attention reads query, key and value, and writes output and logsumexp. Its backward reads these
    five and the output's gradient, and writes three gradients. Dropout inside is redrawn and moves
    nothing.

Collectives
    A rank reads what it contributes and writes what it receives. A gather into memory that already
    holds this rank's part writes the rest. ``c10d`` operators write their first argument, whatever
    the schema says, and read it if there is no other. A sender only reads, a receiver only writes.
    FSDP2's copy into a gather writes only this rank's part.

Scratch memory inside an operator does not count: another kernel could do without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from dpbench.instruments.logical.collectives import NAMESPACES as BETWEEN_RANKS
from dpbench.instruments.logical.collectives import is_root
from dpbench.instruments.logical.memory import Region, region_of, tensors


def names(text: str) -> frozenset[str]:
    """The names in a text."""
    return frozenset(text.split())


FREE = names(
    """
    alias detach detach_ lift_fresh _unsafe_view _reshape_alias view_as_real view_as_complex
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_
    unsafe_split unsafe_split_with_sizes set_ squeeze_ unsqueeze_ transpose_ t_ as_strided_
    is_same_size record_stream
    c10d::barrier _c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd
    """
)
"""Operators that touch metadata only; views are known from the schema."""

OVERWRITERS = names(
    """
    copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_
    cauchy_ _foreach_copy_ _foreach_zero_ eye_
    """
)
"""In-place operators that ignore the old content of their target."""

SHAPE_OF_SELF = names(
    """
    nll_loss_backward nll_loss2d_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    """
)
"""Operators that use only the shape and dtype of their argument ``self``."""

_NORM = ("grad_out input mean rstd weight", "grad_out input mean rstd", "grad_out")
_BATCH_NORM = (
    "grad_out input save_mean save_invstd weight",
    "grad_out input save_mean save_invstd",
)
_SAMPLER = ("grad_output grid", "grad_output input grid")

MADE_OF: Mapping[str, tuple[str, ...]] = {
    "convolution_backward": ("grad_output weight", "grad_output input", "grad_output"),
    "native_layer_norm_backward": _NORM,
    "native_group_norm_backward": _NORM,
    "_fused_rms_norm_backward": ("grad_out input rstd weight", "grad_out input rstd"),
    "native_batch_norm_backward": (*_BATCH_NORM, "grad_out"),
    "native_batch_norm_backward of evaluation": (
        "grad_out running_var weight",
        "grad_out input running_mean running_var",
        "grad_out",
    ),
    "grid_sampler_2d_backward": _SAMPLER,
    "grid_sampler_3d_backward": _SAMPLER,
}
"""For operators whose last argument is ``output_mask``: the arguments that each gradient needs."""

RUNNING = ("running_mean", "running_var")
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")

UNDECLARED_WRITES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(BATCH_NORMS, RUNNING),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
"""Arguments that an operator writes, though its schema does not say so."""

GATHERS = {"embedding": "weight"} | dict.fromkeys(names("index_select gather index take"), "self")
"""Operators that read from this argument as many bytes as they return."""

SCATTERS = names(
    """
    scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_ put_
    index_reduce_
    """
)
"""In-place operators that write only the elements that their indices name."""

ACCUMULATING = frozenset({"scatter_add_", "scatter_reduce_", "index_add_"})
"""Scatters that always read what they add to; others do so by an argument."""

KNOWN = ("aten", "dpbench", "fsdp", *BETWEEN_RANKS)
"""Namespaces whose rules were compared with their kernels. Operators of other namespaces follow the
general rule, from their schema, and are reported as such."""


class Limits(NamedTuple):
    """Upper limits, in bytes, of what is read and written of an argument, if less than all."""

    reads: Mapping[str, int] = {}
    writes: Mapping[str, int] = {}


@cache
def is_free(func: OpOverload) -> bool:
    """Whether an operator moves no tensor data."""
    return bool(func.is_view) or operator_name(func) in FREE


def is_foreign(operator: str) -> bool:
    """Whether an operator, e.g. ``xformers.mul``, belongs to a library that is not in `KNOWN`."""
    return operator.partition(".")[0] not in KNOWN


def asked_for(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """The result of a call, without gradients that its ``output_mask`` leaves out.

    A fake batch norm returns them.
    """
    if operator_name(func) not in MADE_OF:
        return out
    mask = kwargs.get("output_mask") or args[-1]
    return tuple(made if asked else None for made, asked in zip(out, mask, strict=True))


def traffic(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[int, int]:
    """The bytes that a call with the result ``out`` had to read and to write."""
    if is_free(func):
        return 0, 0
    given = arguments_of(func, args, kwargs)
    limits = _limits(operator_name(func), given, out)
    storages: set[int] = set()
    reads: dict[Region, int] = {}
    writes: dict[Region, int] = {}
    for name, is_read, is_written in _arguments(func):
        for tensor in tensors(given.get(name)):
            region, size = region_of(tensor)
            storages.add(region[0])
            if is_read:
                most = min(size, limits.reads.get(name, size))
                reads[region] = max(reads.get(region, 0), most)
            if is_written:
                most = min(size, limits.writes.get(name, size))
                writes[region] = max(writes.get(region, 0), most)
    for tensor in tensors(out):
        region, size = region_of(tensor)
        if region[0] not in storages:  # a new tensor, not an argument that is returned
            writes[region] = size
    return sum(reads.values()), sum(writes.values())


def arguments_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = (name for name, *_ in _arguments(func))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _limits(name: str, given: Mapping[str, Any], out: Any) -> Limits:
    """The limits of an operator that departs from the general rule."""
    beta = given.get("beta") if name.startswith(("add", "badd")) else None
    if name in OVERWRITERS or name in SHAPE_OF_SELF or beta == 0:
        return Limits({"self": 0})
    if name.endswith("_like") or name.startswith("new_"):
        return Limits({"self": 0})
    if name in MADE_OF:
        formulas = MADE_OF[name if given.get("train", True) else f"{name} of evaluation"]
        needed = " ".join(compress(formulas, given["output_mask"])).split()
        return Limits(dict.fromkeys(given.keys() - needed, 0))
    if name in BATCH_NORMS and not given["training"]:
        return Limits(writes=dict.fromkeys(RUNNING, 0))
    if name in GATHERS:
        return Limits({GATHERS[name]: region_of(out)[1]})
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        weight: Tensor = given["weight"]
        return Limits({"weight": given["indices"].numel() * weight.shape[1] * weight.itemsize})
    if name in SCATTERS:
        touched = _touched_elements(name, given) * given["self"].itemsize
        accumulates = name in ACCUMULATING or given.get("accumulate") or "reduce" in given
        return Limits({"self": touched if accumulates else 0}, {"self": touched})
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        return Limits({"self": given["target"].numel() * given["self"].itemsize})
    if name == "fsdp::all_gather_copy_in":
        own = sum(region_of(tensor)[1] for tensor in given["all_gather_inputs"])
        return Limits({"all_gather_output": 0}, {"all_gather_output": own})
    if name in ("c10d::broadcast_", "c10d::reduce_"):
        # The root of a broadcast writes nothing, nor does a reduction outside its root.
        if is_root(given) == (name == "c10d::broadcast_"):
            return Limits(writes={"tensors": 0})
        return Limits({"tensors": 0} if name == "c10d::broadcast_" else {})
    if name == "c10d::_allgather_base_":
        output, own = given["output_tensor"], given["input_tensor"]
        inside = output.untyped_storage()._cdata == own.untyped_storage()._cdata
        rest = region_of(output)[1] - inside * region_of(own)[1]
        return Limits(writes={"output_tensor": rest})
    if name.startswith("_fused_") and given.get("grad_scale") is None:
        return Limits(writes={"grads": 0})
    return Limits()


def _touched_elements(name: str, given: Mapping[str, Any]) -> int:
    """The number of target elements that a scatter writes if its indices are distinct."""
    target: Tensor = given["self"]
    if name == "index_put_":
        indices = {dim: index for dim, index in enumerate(given["indices"]) if index is not None}
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices.values()):
            return target.numel()  # a mask selects by data
        rest = target.numel() // max(1, math.prod(target.shape[dim] for dim in indices))
        together = torch.broadcast_shapes(*(index.shape for index in indices.values()))
        return int(together.numel()) * rest
    if name in ("index_add_", "index_copy_", "index_reduce_", "put_"):
        return int(given["source"].numel())
    rest = target.numel() // max(1, target.shape[given["dim"]]) if name == "index_fill_" else 1
    return int(given["index"].numel()) * rest


@cache
def operator_name(func: Any) -> str:
    """The name, e.g. ``clone`` for ``aten::clone``; with the namespace outside of ``aten``."""
    return str(func.name()).partition(".")[0].removeprefix("aten::")


@cache
def _arguments(func: OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """Each argument of an operator: its name, whether it is read, and whether it is written."""
    undeclared = UNDECLARED_WRITES.get(operator_name(func), ())
    arguments = [
        (
            each.name,
            not each.is_out,
            each.name in undeclared or (each.alias_info is not None and each.alias_info.is_write),
        )
        for each in func._schema.arguments
    ]
    if func.namespace == "c10d":
        name, first = operator_name(func), arguments[0][0]
        alone = "Tensor" not in str(func._schema.arguments[1].type)
        arguments[0] = (first, alone and "::recv" not in name, name != "c10d::send")
    return tuple(arguments)
