"""Computes how many bytes an operator must read, write and send, with the following rules.

The counts are the bytes of an ideal execution. In an ideal execution, operators run one after
another, no cache keeps data from one operator to the next, and no operator fetches a byte twice. A
real GPU moves more bytes if a kernel reads operands several times, as in large matrix products. A
real GPU moves fewer bytes if an operator finds a tensor in the L2 cache.

The general rule
    Each distinct memory region among the inputs is read once. Each output is written once, and so
    is each argument that the schema marks as mutated. A region is the set of bytes that a tensor
    addresses, so ``bmm(g, g.mT)`` reads ``g`` once. A stride-0 (expanded) dimension counts as if it
    had one element. A tensor with overlapping strides counts at most the elements from its first to
    its last element. In-place operators read and write their target. If an argument is a list of
    tensors (``_foreach_*``, ``cat``), each tensor in the list is counted.

Free operators
    Views, ``detach``, ``alias`` and ``_unsafe_view`` only change metadata. ``empty*``,
    ``resize_`` and ``set_`` write nothing. An argument that is returned unchanged is not written.

Arguments that are not read
    Some operators overwrite their target (``copy_``, ``fill_``, ``zero_``, ``normal_`` …). Such a
    target is not read, because its old content does not matter. ``out=`` arguments are not read.
    Arguments that only determine a shape are not read. Examples are the argument of
    ``zeros_like`` and the logits in ``nll_loss_backward`` (see `SHAPE_OF_SELF`). With ``beta=0``,
    ``addmm`` and similar operators do not read their summand.

Arguments that are not written
    ``_fused_*`` optimizers without ``grad_scale`` do not write gradients, although their schemas
    mark gradients as mutable.

Gradients that are not requested
    A gradient that ``output_mask`` excludes is not written. Arguments that only this gradient
    needs are not read (see `GRADIENT_INPUTS`). For example, backward of a convolution does
    not read the weight if the gradient of the input is not requested.

Batch norm
    In training, forward also reads and writes the running statistics, and backward reads the
    statistics of the batch. In evaluation, forward reads the running statistics, and backward reads
    the running statistics that the requested gradients need.

Gathers
    ``embedding``, ``index_select``, ``gather`` and indexing read as many bytes of the source as
    they return, but at most the whole source. ``_embedding_bag`` reads one row of
    the weight per index.
    ``nll_loss_forward`` reads one logit per target.

In-place scatters
    ``scatter_*``, ``index_add_``, ``index_put_`` … write only the elements that the indices select,
    but at most the whole target. Indices are assumed to be distinct, and a mask is assumed to
    select all elements. A scatter reads the selected elements only if it accumulates. Out-of-place
    scatters return a whole new tensor and follow the general rule. ``embedding_dense_backward``
    also follows the general rule, because it writes the whole weight gradient including zeros.
    ``dpbench::clear_dropped`` writes only examples whose gradient is not finite. No example is
    assumed to be one of these.

Fused kernels
    Attention and the kernels of dpbench's trainers (``dpbench::``) follow the general rule. Without
    a mask, the forward of attention reads query, key and value, and writes output and logsumexp.
    The backward reads these five tensors and the output's gradient, and writes the gradients of
    query, key and value. Dropout within attention moves no bytes, because backward draws the same
    random numbers again.

Collectives
    A rank reads the data that it sends and writes the data that it receives. If the output of an
    all-gather already contains this rank's part, this part is not written. ``c10d`` operators write
    their first argument, even if the schema does not mark this argument. These operators also read
    this argument if their second argument contains no tensor. The exceptions are: a send writes
    nothing, a receive reads nothing, the root of a broadcast only reads, the other ranks of a
    broadcast only write, and only the root of a reduction to one rank writes.
    ``fsdp::all_gather_copy_in`` writes only this rank's part of the gathered tensor.

Temporary memory within an operator is not counted, because another implementation of the operator
may not need this memory.

`sent_bytes` computes how many bytes one rank sends in a collective. These bytes do not depend on
the values of tensors. Therefore they can also be computed for PyTorch's fake process group, which
moves no data.

The message
    The message of a collective is the larger of its input and its output. The message of an
    all-gather is its output. The message of a reduce-scatter, all-reduce or broadcast is its input.

Collectives among W ranks
    In an all-gather, reduce-scatter or all-to-all (with equal parts), each rank sends (W - 1)/W of
    the message. In an all-reduce, which is a reduce-scatter and an all-gather, each rank sends
    twice as much. Unless the network itself copies or adds up data, no algorithm lets every rank
    send less. A broadcast is counted as a ring, in which each rank sends the message to the next
    rank, except the rank before the root. In a reduction to one rank, each rank except the root
    sends the message. The sources are Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations" (2009), and "Performance reported by NCCL tests" in NVIDIA's
    nccl-tests.

Other operators
    In a send, the sender sends the message and the receiver sends nothing. In a gather, each rank
    except the root sends its part. In a scatter, the root sends one part to each of the
    other ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from dpbench.instruments.logical.memory import Region, region_of, tensors
from dpbench.instruments.logical.stand_ins import UnsupportedOperation


def names(text: str) -> frozenset[str]:
    """Return the set of names in a text."""
    return frozenset(text.split())


FREE = names(
    """
    alias detach detach_ lift_fresh _unsafe_view _reshape_alias view_as_real view_as_complex
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_
    unsafe_split unsafe_split_with_sizes set_ squeeze_ unsqueeze_ transpose_ t_ as_strided_
    is_same_size record_stream _nested_get_jagged_dummy
    c10d::barrier _c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd
    """
)
"""Operators that move no tensor data. This set omits views, because the schema
of an operator shows whether the operator is a view."""

OVERWRITERS = names(
    """
    copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_
    cauchy_ _foreach_copy_ _foreach_zero_ eye_
    """
)
"""In-place operators that do not read the old content of their target."""

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
"""Operators that read only the shape and dtype of their argument ``self``."""

_NORM = ("grad_out input mean rstd weight", "grad_out input mean rstd", "grad_out")
_BATCH_NORM = (
    "grad_out input save_mean save_invstd weight",
    "grad_out input save_mean save_invstd",
)
_SAMPLER = ("grad_output grid", "grad_output input grid")

GRADIENT_INPUTS: Mapping[str, tuple[str, ...]] = {
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
"""For each operator, the arguments that each of its gradients needs.

The gradients have the same order as in ``output_mask``, the last argument of these operators, which
selects gradients.
"""

RUNNING = ("running_mean", "running_var")
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")

UNDECLARED_WRITES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(BATCH_NORMS, RUNNING),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
"""Arguments that an operator writes although its schema does not mark them."""

GATHERS = {"embedding": "weight"} | dict.fromkeys(names("index_select gather index take"), "self")
"""Operators that read only a part of one argument, and the name of this argument.

Each of these operators reads at most as many bytes of this argument as it returns.
"""

SCATTERS = names(
    """
    scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_ put_
    index_reduce_
    """
)
"""In-place operators that write only the elements that their indices select."""

ACCUMULATING = frozenset({"scatter_add_", "scatter_reduce_", "index_add_"})
"""Scatters that read the elements that they write, whatever their arguments are.

Other scatters read the elements only if ``accumulate`` is True or ``reduce`` is passed.
"""

BETWEEN_RANKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of collectives."""

KNOWN = ("aten", "dpbench", "fsdp", *BETWEEN_RANKS)
"""Namespaces of operators whose rules were compared with the code of their kernels.

Operators of other namespaces follow the general rule. Reports name these operators.
"""


class ByteCaps(NamedTuple):
    """Upper limits for the bytes that an operator reads and writes, by argument.

    Arguments without a limit follow the general rule.
    """

    reads: Mapping[str, int] = {}
    writes: Mapping[str, int] = {}


@cache
def is_free(func: OpOverload) -> bool:
    """Return True if an operator moves no tensor data."""
    return bool(func.is_view) or operator_name(func) in FREE


def uses_general_rule(operator: str) -> bool:
    """Return True if the namespace of an operator such as ``xformers.mul`` is not in `KNOWN`."""
    return operator.partition(".")[0] not in KNOWN


def drop_masked_gradients(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Any:
    """Return the result of a call without the gradients that its ``output_mask`` excludes.

    Only results of the operators in `GRADIENT_INPUTS` change. On fake tensors, batch norm also
    returns excluded gradients.
    """
    if operator_name(func) not in GRADIENT_INPUTS:
        return out
    mask = kwargs.get("output_mask") or args[-1]
    return tuple(made if asked else None for made, asked in zip(out, mask, strict=True))


def bytes_moved(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[int, int]:
    """Return how many bytes a call with result ``out`` must read, and how many it must write."""
    if is_free(func):
        return 0, 0
    given = arguments_of(func, args, kwargs)
    caps = _byte_caps(operator_name(func), given, out)
    storages: set[int] = set()
    reads: dict[Region, int] = {}
    writes: dict[Region, int] = {}
    for name, is_read, is_written in _arguments(func):
        for tensor in tensors(given.get(name)):
            region, size = region_of(tensor)
            storages.add(region[0])
            if is_read:
                most = min(size, caps.reads.get(name, size))
                reads[region] = max(reads.get(region, 0), most)
            if is_written:
                most = min(size, caps.writes.get(name, size))
                writes[region] = max(writes.get(region, 0), most)
    for tensor in tensors(out):
        region, size = region_of(tensor)
        if region[0] not in storages:  # a new tensor, not a returned argument
            writes[region] = size
    return sum(reads.values()), sum(writes.values())


def arguments_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    names = (name for name, *_ in _arguments(func))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _byte_caps(name: str, given: Mapping[str, Any], out: Any) -> ByteCaps:
    """Return the limits of a call. A call without limits follows the general rule."""
    beta = given.get("beta") if name.startswith(("add", "badd")) else None
    if name in OVERWRITERS or name in SHAPE_OF_SELF or beta == 0:
        return ByteCaps({"self": 0})
    if name.endswith("_like") or name.startswith("new_"):
        return ByteCaps({"self": 0})
    if name in GRADIENT_INPUTS:
        formulas = GRADIENT_INPUTS[name if given.get("train", True) else f"{name} of evaluation"]
        needed = " ".join(compress(formulas, given["output_mask"])).split()
        return ByteCaps(dict.fromkeys(given.keys() - needed, 0))
    if name in BATCH_NORMS and not given["training"]:
        return ByteCaps(writes=dict.fromkeys(RUNNING, 0))
    if name in GATHERS:
        return ByteCaps({GATHERS[name]: region_of(out)[1]})
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        weight: Tensor = given["weight"]
        return ByteCaps({"weight": given["indices"].numel() * weight.shape[1] * weight.itemsize})
    if name in SCATTERS:
        touched = _touched_elements(name, given) * given["self"].itemsize
        accumulates = name in ACCUMULATING or given.get("accumulate") or "reduce" in given
        return ByteCaps({"self": touched if accumulates else 0}, {"self": touched})
    if name == "dpbench::clear_dropped":
        return ByteCaps({"tensor": 0}, {"tensor": 0})
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        return ByteCaps({"self": given["target"].numel() * given["self"].itemsize})
    if name == "fsdp::all_gather_copy_in":
        own = sum(region_of(tensor)[1] for tensor in given["all_gather_inputs"])
        return ByteCaps({"all_gather_output": 0}, {"all_gather_output": own})
    if name in ("c10d::broadcast_", "c10d::reduce_"):
        # The root of a broadcast writes nothing. In a reduction to one rank, only the root writes.
        if is_root(given) == (name == "c10d::broadcast_"):
            return ByteCaps(writes={"tensors": 0})
        return ByteCaps({"tensors": 0} if name == "c10d::broadcast_" else {})
    if name == "c10d::_allgather_base_":
        output, own = given["output_tensor"], given["input_tensor"]
        inside = output.untyped_storage()._cdata == own.untyped_storage()._cdata
        rest = region_of(output)[1] - inside * region_of(own)[1]
        return ByteCaps(writes={"output_tensor": rest})
    if name.startswith("_fused_") and given.get("grad_scale") is None:
        return ByteCaps(writes={"grads": 0})
    return ByteCaps()


def _touched_elements(name: str, given: Mapping[str, Any]) -> int:
    """Return the number of target elements that a scatter writes.

    Indices are assumed to be distinct, and a mask is assumed to select all elements.
    """
    target: Tensor = given["self"]
    if name == "index_put_":
        indices = {dim: index for dim, index in enumerate(given["indices"]) if index is not None}
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices.values()):
            return target.numel()  # the number of selected elements depends on the mask's values
        rest = target.numel() // max(1, math.prod(target.shape[dim] for dim in indices))
        together = torch.broadcast_shapes(*(index.shape for index in indices.values()))
        return int(together.numel()) * rest
    if name in ("index_add_", "index_copy_", "index_reduce_", "put_"):
        return int(given["source"].numel())
    rest = target.numel() // max(1, target.shape[given["dim"]]) if name == "index_fill_" else 1
    return int(given["index"].numel()) * rest


@cache
def operator_name(func: Any) -> str:
    """Return the name of an operator, without the namespace if that is ``aten``.

    For example, ``aten::clone`` has the name ``clone``.
    """
    return str(func.name()).partition(".")[0].removeprefix("aten::")


@cache
def _arguments(func: OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """Return (name, is read, is written) for each argument of an operator."""
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


# --- properties of operators ---------------------------------------------------------------------

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


# --- bytes sent to other ranks -------------------------------------------------------------------

REDUCE_TO_ALL = re.compile("::all_?reduce")
SHARE_WITH_ALL = re.compile("all_?gather|::_?reduce_scatter|all_?to_?all")
PASS_ON = re.compile("::(broadcast|reduce_$|i?send)")
BY_ROOT = re.compile("::(gather|scatter)_$")
SEND_NOTHING = re.compile(
    "barrier|::i?recv|wait_tensor|check_for_nan|_wrap_tensor_autograd|mesh_get_process_group"
)
"""The five patterns match the names of operators, because PyTorch has several names for most
collectives."""


def sent_bytes(name: str, given: Mapping[str, Any], out: Any) -> int:
    """Return how many bytes this rank sends to other ranks in a call of an operator.

    Args:
        name: name of the operator, with its namespace.
        given: arguments of the call, by name.
        out: result of the call.

    Raises:
        UnsupportedOperation: the collective is unknown.
    """
    if not name.startswith(tuple(f"{each}::" for each in BETWEEN_RANKS)) or SEND_NOTHING.search(
        name
    ):
        return 0
    whole = max(_bytes(value) for value in (*given.values(), out))
    if "send" in name:
        return whole
    ranks = _group(given).size()
    if PASS_ON.search(name):
        last = _root(given) - ("broadcast" in name)
        return 0 if _group(given).rank() == last % ranks else whole
    if BY_ROOT.search(name):
        if is_root(given) == ("gather" in name):
            return 0
        return whole * (ranks - 1) // ranks if is_root(given) else whole
    if REDUCE_TO_ALL.search(name):
        return 2 * whole * (ranks - 1) // ranks
    if SHARE_WITH_ALL.search(name):
        return whole * (ranks - 1) // ranks
    raise UnsupportedOperation(f"dpbench has no formula for the bytes that {name} sends")


def _bytes(value: Any) -> int:
    return sum(region_of(tensor)[1] for tensor in tensors(value))


def is_root(given: Mapping[str, Any]) -> bool:
    """Return True if this rank is the root of a collective with these arguments."""
    return _group(given).rank() == _root(given)


def _root(given: Mapping[str, Any]) -> int:
    return int(given["root_rank"] if "root_rank" in given else given["src"])


def _group(given: Mapping[str, Any]) -> ProcessGroup:
    """Return the process group of a collective with these arguments."""
    if (group := given.get("process_group")) is not None:
        return ProcessGroup.unbox(group)
    named = given["group_name"]
    return named if isinstance(named, ProcessGroup) else _resolve_process_group(named)
