"""The counts of each operator and of each kernel of a step.

Bytes of kernels are counted in kernel replay, which does not see copies and memsets. Rows made from
them have separate metrics, so that they never mix with those of ranges.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from dpbench.core.metrics import METRICS, unit
from dpbench.core.subject import Subject
from dpbench.results.rows import STEP, Measurement

if TYPE_CHECKING:
    import pandas as pd

NOT_COUNTED = "NOT COUNTED"
"""The beginning of a note on an operator that logical counting left out."""

NO_FLOPS = "FLOPS NOT COUNTED"
"""The beginning of a note on an operator whose floating-point operations were not counted."""

ELSEWHERE = f"{NOT_COUNTED}: operators that ran in other threads or forks while steps counted"

HEAVY = 0.01
"""An operator with more than this part of a step's bytes is heavy."""


@dataclass(frozen=True)
class Entry:
    """One line of a document's list of operators or kernels."""

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `as_row`; other entries of the row are ignored."""
        return cls(**{each.name: row[each.name] for each in fields(cls) if each.name in row})


@dataclass(frozen=True)
class OperatorCount(Entry):
    """What one operator did in one phase, for one module, from one source line.

    A list of them makes a ``pandas.DataFrame``.
    """

    phase: str
    operator: str  # e.g. aten.clone
    calls: int
    read_bytes: int  # logical, B
    write_bytes: int
    flops: int  # a multiply-add counts as two
    general_rule: bool = False  # a guess by schema: the library's kernels are unknown
    collective_bytes: int = 0  # sent to other ranks
    module: str = ""  # that ran it in forward, e.g. blocks.*.mlp; empty outside of modules
    line: str = ""  # e.g. model.py:24 forward; in backward the line of forward

    @property
    def total_bytes(self) -> int:
        """Logical bytes read and written, B."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True)
class MemoryLine(Entry):
    """Bytes that one source line allocated in one phase and that were live at a step's peak."""

    phase: str
    line: str  # e.g. train.py:24 step (AddmmBackward0), or what was made before counted steps
    held_bytes: int


def guesses(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """The heavy operators whose bytes are a guess, each with its share of the step's bytes."""
    counts = list(counts)
    total = sum(count.total_bytes for count in counts)
    guessed = Counter[str]()
    for count in counts:
        guessed[count.operator] += count.total_bytes * count.general_rule
    return {name: size / total for name, size in guessed.items() if size > HEAVY * total}


CATEGORIES: tuple[tuple[str, str], ...] = (
    ("attention", r"fmha|flash|MemEffAttention|sdpa|cudnn::fusion"),
    ("random", r"distribution_|curand|philox|dropout|randperm|bernoulli"),
    ("reduction", r"LpNormFunctor|lpnorm_cleanup|dot_kernel|reduce_1Block_kernel"),
    ("optimizer", r"multi_tensor_apply|Fused(Sgd|Adam|Adagrad)"),
    ("normalisation", r"(layer|batch|group|rms)_?norm|GammaBeta|RowwiseMoments|ComputeFusedParams"),
    ("other", r"sort|unique|::scan::|_scan_|adjacent_difference|topk|nonzero|DeviceSelect|Compact"),
    ("embedding", r"embedding|grad_weight|gather|scatter|indexSelect|indexFunc|index_(put|kernel)"),
    ("GEMM", r"gemm|gemv|cutlass_|cublas|nvjet|splitK"),
    ("copy", r"copy_kernel|CatArrayBatchedCopy|memcpy"),
    ("set", r"FillFunctor|arange_|linspace|memset"),
    ("reduction", r"reduce_kernel|softmax|nll_loss|_reduce_|DeviceReduce|SegmentedReduce"),
    ("elementwise", r"elementwise|pointwise|transform_kernel"),
)
"""Categories, and what a kernel's whole name contains, ignoring case; the first match counts. The
names are those of PyTorch's eager mode, demangled by Nsight Compute. Multi-tensor kernels count as
the optimizer's, which launches them."""

_WRAPPERS = re.compile(
    r"(Unary|AUnary|BUnary|Binary)Functor|gpu_kernel_impl\w*|at_cuda_detail|cuda_cub"
)
"""Names in template arguments that only wrap a more specific name."""

_TELLING = re.compile(
    r"\w*?(Functor\w*|functor|Ops|_kernel\w*|KernelImpl|_cuda\w*|_scalar|Epilogue|Agent)"
)
"""Names in template arguments that name the operation."""

_GENERIC = {"Kernel", "Kernel2", "device_kernel", "kernel"}
"""Kernels with an uninformative name."""


@cache
def category(name: str) -> str | None:
    """The first of `CATEGORIES` that fits a demangled name, or None."""
    fitting = (kind for kind, pattern in CATEGORIES if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, None)


@cache
def short_name(name: str) -> str:
    """A demangled name with its template arguments folded to the one that names the operation.

    Return type, parameters and most namespaces go as well::

        void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>,
        std::array<char *, (unsigned long)1>>(int, T2, T3)

    becomes ``vectorized_elementwise_kernel<FillFunctor>``, and cuBLAS's tile sizes, which are
    template arguments in another spelling, are cut off.
    """
    name = re.sub(r"(<unnamed>|\(anonymous namespace\)|\{anonymous\})::", "", name)
    path = name
    while (shorter := re.sub(r"<[^<>]*>", "", path)) != path:
        path = shorter
    path = path.partition("(")[0].rpartition(" ")[2]
    base = path.rpartition("::")[2]
    arguments = name.partition(f"{base}<")[2]
    if base in _GENERIC:
        if library := re.match(r"\s*(cutlass_\w+)", arguments):
            return library[1]
        return "::".join(path.split("::")[-2:])
    base = re.sub(r"_tilesize\w*?_execute(_split_k)?_kernel\w*", r"\1", base)
    for word in re.findall(r"[A-Za-z_]\w*", arguments):
        if _TELLING.fullmatch(word) and not _WRAPPERS.fullmatch(word):
            return f"{base}<{word}>"
    return base or name


ADDED_UP = ("launches", "read_bytes", "write_bytes", "l2_bytes", "seconds")
"""The fields that add up over launches."""


@dataclass(frozen=True)
class KernelCount(Entry):
    """One launch of a kernel in a phase of a step, or all of them added up."""

    repeat: int  # which of the active steps, from 0
    phase: str
    name: str  # demangled, template arguments and parameters included
    launches: int
    read_bytes: float  # from DRAM, B
    write_bytes: float  # to DRAM, B
    l2_bytes: float  # all traffic of the L2 cache's slices, B
    seconds: float  # from its start on the GPU to its end

    @property
    def kernel(self) -> str:
        """The kernel's short name."""
        return short_name(self.name)

    @property
    def dram_bytes(self) -> float:
        """Bytes read from and written to DRAM."""
        return self.read_bytes + self.write_bytes

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types, short name and category included."""
        kind = category(self.name) or "other"
        return {**super().as_row(), "kernel": self.kernel, "category": kind}


def fold(launches: Iterable[KernelCount]) -> tuple[KernelCount, ...]:
    """Launches summed by step, phase and kernel; those with most DRAM bytes first."""
    groups: dict[tuple[Any, ...], list[KernelCount]] = defaultdict(list)
    for launch in launches:
        groups[launch.repeat, launch.phase, launch.name].append(launch)
    counts = [
        replace(group[0], **{name: sum(getattr(x, name) for x in group) for name in ADDED_UP})
        for group in groups.values()
    ]
    return tuple(sorted(counts, key=lambda count: -count.dram_bytes))


def kernel_rows(
    case: Subject, by: str, counts: Iterable[KernelCount], device: str, tool: str, *, whole: bool
) -> list[Measurement]:
    """The metrics of the instrument ``by`` as sums over kernels.

    By phase and, if all kernels of the step were counted, for the step.
    """
    sums: dict[tuple[int, str, str], float] = defaultdict(float)
    for count in counts:
        for phase in (count.phase, STEP) if whole else (count.phase,):
            for metric in METRICS.had_by(by):
                sums[count.repeat, phase, metric.name] += getattr(count, metric.source)
    return [
        Measurement(case, by, phase, metric, value, unit(metric), repeat, device, tool)
        for (repeat, phase, metric), value in sums.items()
    ]


def kernel_table(
    counts: Iterable[KernelCount],
    by: Sequence[str] = ("phase", "kernel"),
    *,
    step_bytes: float | None = None,
    bandwidth: float | None = None,
) -> pd.DataFrame:
    """What groups of kernels move in one step, most DRAM bytes first.

    Args:
        counts: one or more.
        by: columns that make a group, e.g. ``["category"]``.
        step_bytes: the bytes that count as the whole; those of all kernels if None.
        bandwidth: of the card's memory, B/s.

    Returns:
        Indexed by group: sums per step of `KernelCount`'s numbers, ``dram_bytes``, ``share`` of
        the whole, and ``ceiling``, the fraction of ``bandwidth`` that the bytes ÷ the kernels'
        own time reach (NaN without a bandwidth).
    """
    import pandas as pd  # not in processes that only count

    frame = pd.DataFrame([count.as_row() for count in counts])
    table = frame.groupby(list(by))[[*ADDED_UP]].sum() / frame.repeat.nunique()
    table["dram_bytes"] = table.read_bytes + table.write_bytes
    whole = step_bytes if step_bytes is not None else table.dram_bytes.sum()
    table["share"] = table.dram_bytes / whole if whole else float("nan")
    table["ceiling"] = table.dram_bytes / table.seconds / (bandwidth or float("nan"))
    return table.sort_values("dram_bytes", ascending=False, kind="stable")
