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

from dpbench.instruments.logical.collectives import is_root
from dpbench.instruments.logical.regions import Region, region_of, tensors


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
"""Operators that take their argument ``self`` for its shape and dtype alone."""

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
"""Arguments that an operator writes, which its schema does not say."""

GATHERS = {"embedding": "weight"} | dict.fromkeys(names("index_select gather index take"), "self")
"""Operators that read of this argument only what comes out."""

SCATTERS = names(
    "scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_"
)
"""In-place operators that touch of their target only what their indices name."""

ACCUMULATING = frozenset({"scatter_add_", "scatter_reduce_", "index_add_"})
"""Scatters that add to what is there, and so read it; others may, by an argument."""

REVIEWED = names(
    """
    mm addmm bmm baddbmm addbmm addmv mv dot outer addr
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward
    convolution convolution_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward
    avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    relu threshold_backward gelu gelu_backward silu silu_backward mish mish_backward tanh
    tanh_backward sigmoid sigmoid_backward softplus softplus_backward leaky_relu leaky_relu_backward
    _softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    mse_loss mse_loss_backward native_dropout native_dropout_backward
    embedding embedding_dense_backward index_select gather take index index_put index_add
    index_copy index_fill scatter scatter_add scatter_reduce slice_backward select_backward
    slice_scatter select_scatter unique_dim _unique2 unique_consecutive nonzero masked_select
    add sub rsub mul div addcmul addcdiv lerp neg abs sign reciprocal sqrt rsqrt exp log log1p
    pow square sin cos erf nextafter floor ceil round remainder fmod maximum minimum clamp clamp_min
    clamp_max where masked_fill tril triu eq ne lt le gt ge logical_not logical_and logical_or
    bitwise_not bitwise_and bitwise_or isnan isinf isfinite
    sum mean var var_mean std prod amax amin max min any all argmax argmin norm
    linalg_vector_norm cumsum sort topk powsum
    cat stack clone copy fill zero _to_copy flip roll constant_pad_nd repeat repeat_interleave
    split_with_sizes_copy _local_scalar_dense
    zeros ones full arange eye scalar_tensor linspace rand randn randint randperm normal uniform
    bernoulli multinomial random exponential lift_fresh_copy
    zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
    _fused_sgd _fused_adam _fused_adamw _fused_adagrad
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale
    dpbench.gram_norms dpbench.layer_norm_samples dpbench.noisy_descent dpbench.scaled
    dpbench.gram_sums dpbench.wide_product
    fsdp.all_gather_copy_in fsdp.chunk_cat fsdp.split_with_sizes_copy
    c10d.allreduce c10d.broadcast c10d._allgather_base c10d._reduce_scatter_base
    c10d.allgather c10d.reduce_scatter c10d.alltoall_base
    _c10d_functional.all_reduce _c10d_functional.broadcast _c10d_functional.all_to_all_single
    _c10d_functional.all_gather_into_tensor _c10d_functional.reduce_scatter_tensor
    """
)
"""Operators (without ``_foreach_`` and the in-place ``_``) whose rule was reviewed. Others that are
neither free nor overwriters are counted by the general rule and reported as such."""


class Limits(NamedTuple):
    """At most how many bytes of an argument are read and written, where that is not all."""

    reads: Mapping[str, int] = {}
    writes: Mapping[str, int] = {}


@cache
def is_free(func: OpOverload) -> bool:
    """Whether an operator moves no tensor data."""
    return bool(func.is_view) or operator_name(func) in FREE


def is_reviewed(operator: str) -> bool:
    """Whether an operator, e.g. ``aten.clone``, has a reviewed rule; else it is a guess."""
    name = operator.removeprefix("aten.")
    base = name.removeprefix("_foreach_").removesuffix("_")
    return name in OVERWRITERS or name in REVIEWED or base in REVIEWED


def asked_for(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """What a call returned, without gradients that its ``output_mask`` leaves out.

    A fake batch norm makes them all the same.
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
        if is_root(given) == (name == "c10d::broadcast_"):  # only sends
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
    if name in ("index_add_", "index_copy_"):
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
