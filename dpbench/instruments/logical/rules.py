"""How many bytes one ATen operator must read and write, and why.

The count is a floor: what an ideal execution moves that runs one operator after another, has
no cache that outlives an operator, and inside an operator never fetches a byte twice. A real
GPU moves more where a kernel reads its operands again (large matrix products), and less where
a tensor is still in the L2 cache when the next operator wants it.

The general rule
    Each distinct region of memory among the inputs is read once; each output, and each argument
    that the operator's schema marks as mutated, is written once. A region is what a tensor
    addresses, not how: ``bmm(g, g.mT)`` reads ``g`` once. A stride-0 (expanded) dimension
    counts once, and overlapping strides never count more than the span that they cover.
    In-place operators read and write their target; the tensors in lists (``_foreach_*``,
    ``cat``) count one by one.

Free
    Views, ``detach``, ``alias``, ``_unsafe_view`` touch metadata only. Allocation (``empty*``,
    ``resize_``, ``set_``) writes nothing. A tensor that comes out as it went in is not written.

Not read
    The target of a pure overwriter (``copy_``, ``fill_``, ``zero_``, random ``normal_`` …) and
    every ``out=`` argument: their old content cannot matter. The argument of ``zeros_like`` and
    its kin, and arguments that a backward formula takes for their shape alone (logits in
    ``nll_loss_backward``), see `SHAPE_OF_SELF`. What a product is added to ``beta=0`` times.
    Gradients in ``_fused_*`` optimizers are marked mutable for the sake of ``grad_scale``: without
    one they are not written.

Not asked for
    A gradient that ``output_mask`` leaves out is not written, and what only it is made of is not
    read, see `MADE_OF`: the backward of a model's first convolution does not read the weight.

Batch norm
    Training also reads and writes the running statistics; its backward reads the batch's.
    Evaluation, and its backward, read the running ones.

Gathers
    ``embedding``, ``index_select``, ``gather``, indexing: of the source only what comes out (a bag
    of embeddings reads a row for each index), at most the whole source. ``nll_loss_forward`` reads
    one logit for each target.

Scatters in place
    ``scatter_*``, ``index_add_``, ``index_put_`` …: of the target only what the indices touch,
    at most the whole target; read as well only if they accumulate. Their out-of-place forms
    produce a whole new tensor and follow the general rule, as does ``embedding_dense_backward``,
    which writes the whole weight gradient, zeros included.

Fused kernels
    Attention reads query, key and value and writes output and logsumexp; its backward reads those
    five and the output's gradient and writes three gradients: the general rule, as for the kernels
    of dpbench's trainers (``dpbench::``). Dropout inside is drawn again, and moves nothing.

Collectives
    A rank reads what it contributes and writes what it gets; a gather into memory that holds its
    own part writes the rest. ``c10d`` writes its first argument, whatever schemas say, and reads it
    if it is the only one; who sends only reads, who receives only writes. FSDP2's copy into a
    gather writes the part of this rank alone.

Scratch memory inside an operator is not counted: another kernel could do without it.
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
"""Operators that touch metadata only, beside those whose schema says that they are views."""

OVERWRITERS = names(
    """
    copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_
    cauchy_ _foreach_copy_ _foreach_zero_ eye_
    """
)
"""In-place operators after which nothing of the target's old content is left."""

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
"""Of operators with an ``output_mask``, their last argument, what each gradient is made of."""

RUNNING = ("running_mean", "running_var")
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")

UNSAID: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(BATCH_NORMS, RUNNING),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
"""Arguments that an operator writes although its schema does not say so."""

GATHERS = {"embedding": "weight"} | dict.fromkeys(names("index_select gather index take"), "self")
"""Operators that read of this argument only as many bytes as they return."""

SCATTERS = names(
    """
    scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_ put_
    index_reduce_
    """
)
"""In-place operators that read and write only those elements that their indices name."""

ACCUMULATING = frozenset({"scatter_add_", "scatter_reduce_", "index_add_"})
"""Scatters that add to what is there, and so read it; others may, by an argument."""

KNOWN = ("aten", "dpbench", "fsdp", *BETWEEN_RANKS)
"""Namespaces of operators whose rules were compared with what their kernels do. Those of others are
counted by the general rule, which is what their schemas say, and are reported as such."""


class Limits(NamedTuple):
    """At most how many bytes of an argument are read and written, where that is not all."""

    reads: Mapping[str, int] = {}
    writes: Mapping[str, int] = {}


@cache
def is_free(func: OpOverload) -> bool:
    """Whether an operator moves no tensor data."""
    return bool(func.is_view) or operator_name(func) in FREE


def is_foreign(operator: str) -> bool:
    """Whether an operator, e.g. ``xformers.mul``, is of a library whose kernels are not known."""
    return operator.partition(".")[0] not in KNOWN


def asked_for(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """What a call returned, without gradients that its ``output_mask`` leaves out.

    A fake batch norm returns those, too.
    """
    if operator_name(func) not in MADE_OF:
        return out
    mask = kwargs.get("output_mask") or args[-1]
    return tuple(made if asked else None for made, asked in zip(out, mask, strict=True))


def traffic(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[int, int]:
    """The bytes that a finished call had to read and to write; ``out`` is what it returned."""
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
    """The arguments that a call was given, by name."""
    names = (name for name, *_ in _arguments(func))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _limits(name: str, given: Mapping[str, Any], out: Any) -> Limits:
    """Where an operator departs from the general rule."""
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
        # A broadcast's root sends and receives nothing; so do all but the root of a reduction.
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
    """How many elements of its target a scatter touches if its indices are distinct."""
    target: Tensor = given["self"]
    if name == "index_put_":
        indices = {dim: index for dim, index in enumerate(given["indices"]) if index is not None}
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices.values()):
            return target.numel()  # what a mask selects depends on the data
        rest = target.numel() // max(1, math.prod(target.shape[dim] for dim in indices))
        together = torch.broadcast_shapes(*(index.shape for index in indices.values()))
        return int(together.numel()) * rest
    if name in ("index_add_", "index_copy_", "index_reduce_", "put_"):
        return int(given["source"].numel())
    rest = target.numel() // max(1, target.shape[given["dim"]]) if name == "index_fill_" else 1
    return int(given["index"].numel()) * rest


@cache
def operator_name(func: Any) -> str:
    """``clone`` for ``aten::clone``; with its namespace, ``library::name``, for all others."""
    return str(func.name()).partition(".")[0].removeprefix("aten::")


@cache
def _arguments(func: OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """The arguments of an operator, and whether they are read, and written."""
    unsaid = UNSAID.get(operator_name(func), ())
    arguments = [
        (
            each.name,
            not each.is_out,
            each.name in unsaid or (each.alias_info is not None and each.alias_info.is_write),
        )
        for each in func._schema.arguments
    ]
    if func.namespace == "c10d":
        name, first = operator_name(func), arguments[0][0]
        alone = "Tensor" not in str(func._schema.arguments[1].type)
        arguments[0] = (first, alone and "::recv" not in name, name != "c10d::send")
    return tuple(arguments)
