"""The counts of each operator and of each kernel in a step.

Nsight Compute counts the bytes of kernels by replaying each kernel. These counts leave out copies
and memsets. Sums over kernels can therefore be smaller than the bytes of a step, so they are
separate metrics.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import msgspec

from dpbench.core.metrics import METRICS, unit
from dpbench.core.subject import Subject
from dpbench.results.rows import STEP, Measurement, Number

NOT_COUNTED = "NOT COUNTED"
"""The first words of a note on an operator that logical counting left out."""

NO_FLOPS = "FLOPS NOT COUNTED"
"""The first words of a note on an operator whose floating-point operations were not counted."""

ELSEWHERE = f"{NOT_COUNTED}: operators that ran in other threads or forks while steps counted"

POISSON = "batches are Poisson samples, so they differ in size"
"""Note on a script whose data loader has a sampler of Poisson batches."""

STEP_LOST = f"{NOT_COUNTED}: a step in which the script ended a dispatch mode of dpbench"
"""The first words of a note on a step whose operators dpbench did not receive."""

HEAVY = 0.01
"""An operator is heavy if its share of the logical bytes of a step is larger than this."""


@dataclass(frozen=True)
class Entry:
    """One entry of a list of operators, kernels or memory lines in the document of a run."""

    def as_row(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        return dict(vars(self))


@dataclass(frozen=True)
class OperatorCount(Entry):
    """The calls of one operator in one phase, for one module and one source line.

    For a script or function, the numbers are means over the counted steps.

    Logical bytes are counted from the sizes of inputs and outputs, without hardware.
    """

    phase: str
    operator: str  # e.g. aten.clone
    calls: Number
    read_bytes: Number  # logical bytes
    write_bytes: Number  # logical bytes
    flops: Number  # a multiply-add counts as two
    general_rule: bool = False  # true if the bytes are a guess from the schema
    collective_bytes: Number = 0  # bytes sent to other ranks
    module: str = ""  # the module whose forward ran the operator, e.g. blocks.3.mlp, or empty
    line: str = ""  # e.g. model.py:24 forward; in backward, the line of the forward operator

    @property
    def total_bytes(self) -> float:
        """The sum of the logical bytes read and written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True)
class MemoryLine(Entry):
    """Bytes that one source line allocated in one phase, and that were in use at a step's peak."""

    phase: str
    line: str  # e.g. train.py:24 step (AddmmBackward0), or "made before the counted steps"
    held_bytes: int


def guesses(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """Return, for each operator, its guessed bytes as a share of a step's logical bytes.

    Operators with a share of at most `HEAVY` are left out.
    """
    counts = list(counts)
    total = sum(count.total_bytes for count in counts)
    guessed: dict[str, float] = defaultdict(float)
    for count in counts:
        guessed[count.operator] += count.total_bytes * count.general_rule
    return {name: size / total for name, size in guessed.items() if size > HEAVY * total}


_RANGE = re.compile(r"(?<![^.])(\d+)-(\d+)(?![^.])")


def in_ranges(modules: Iterable[str]) -> str:
    """Name modules in short: those that count up in one number become ``blocks.0-23.mlp``."""
    written: list[str] = []
    first: list[str] = []
    last: list[str] = []
    for parts in (*(module.split(".") for module in modules), []):
        following = [
            [*last[:at], str(int(part) + 1), *last[at + 1 :]]
            for at, part in enumerate(last)
            if part.isdecimal() and [*first[:at], part, *first[at + 1 :]] == last
        ]
        if parts not in following:
            both = zip(first, last, strict=True)
            written += [".".join(a if a == b else f"{a}-{b}" for a, b in both)] if first else []
            first = parts
        last = parts
    return ", ".join(written)


def modules(written: str) -> Iterator[str]:
    """Yield the modules of a text. This inverts `in_ranges`."""
    for name in written.split(", "):
        ends = _RANGE.search(name)
        counted = range(int(ends[1]), int(ends[2]) + 1) if ends else [0]
        yield from (_RANGE.sub(str(number), name) for number in counted)


def numbers(module: str) -> list[int]:
    """Return the numbers in a module's name, by which layers are sorted."""
    return [int(number) for number in re.findall(r"\d+", module)]


def unnumbered(module: str) -> str:
    """Return a module's name with ``*`` in place of numbers, which layers that are alike share."""
    return re.sub(r"\b\d+\b", "*", module)


MODULE = "module"
"""The field of operators in which successive entries of one line differ."""


class Packed(msgspec.Struct, forbid_unknown_fields=True):
    """A list of entries that have the same fields.

    Args:
        same: the fields that have one value in all entries.
        texts: for each other field with texts, the different texts. A line has the index of a text.
            A text in the field `MODULE` can name several modules, see `in_ranges`. Then the line
            stands for an entry of each.
        columns: the fields that a line has.
        lines: the values of the entries.
    """

    same: dict[str, Any]
    texts: dict[str, list[str]]
    columns: list[str]
    lines: list[list[Any]]

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries. This inverts `pack`."""
        for line in self.lines:
            entry = {**self.same, **dict(zip(self.columns, line, strict=True))}
            entry |= {name: texts[entry[name]] for name, texts in self.texts.items()}
            named = [{MODULE: each} for each in modules(entry[MODULE])] if MODULE in entry else [{}]
            yield from (entry | name for name in named)


def pack(entries: Sequence[Mapping[str, Any]]) -> Packed:
    """Pack at least one entry."""
    if MODULE in entries[0]:
        alike = [[*found] for _, found in groupby(entries, lambda each: {**each, MODULE: ""})]
        entries = [{**e[0], MODULE: in_ranges(each[MODULE] for each in e)} for e in alike]
    values = {name: [each[name] for each in entries] for name in entries[0]}
    columns = [name for name, of in values.items() if of.count(of[0]) < len(of)]
    texts = {
        name: {text: at for at, text in enumerate(dict.fromkeys(values[name]))}
        for name in columns
        if all(isinstance(value, str) for value in values[name])
    }
    lines = [[texts[n][each[n]] if n in texts else each[n] for n in columns] for each in entries]
    same = {name: of[0] for name, of in values.items() if name not in columns}
    return Packed(same, {name: [*of] for name, of in texts.items()}, columns, lines)


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
"""Categories of kernels, each with a pattern. A kernel belongs to the first category whose pattern
occurs in its demangled name, ignoring case. The patterns fit kernels of PyTorch's eager mode as
Nsight Compute names them. Multi-tensor kernels are in the category ``optimizer``, because PyTorch's
optimizers launch them."""

_WRAPPERS = re.compile(
    r"(Unary|AUnary|BUnary|Binary)Functor|gpu_kernel_impl\w*|at_cuda_detail|cuda_cub"
)
"""Template arguments that only wrap a template argument with a more specific name."""

_TELLING = re.compile(
    r"\w*?(Functor\w*|functor|Ops|_kernel\w*|KernelImpl|_cuda\w*|_scalar|Epilogue|Agent)"
)
"""Template arguments that name the operation."""

_GENERIC = {"Kernel", "Kernel2", "device_kernel", "kernel"}
"""Kernel names that say nothing about the operation."""


@cache
def category(name: str) -> str | None:
    """Return the first of `CATEGORIES` that fits a demangled name, or None."""
    fitting = (kind for kind, pattern in CATEGORIES if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, None)


@cache
def short_name(name: str) -> str:
    """Shorten a demangled name to the names of the kernel and, if known, of its operation.

    One template argument that names the operation is kept. Other template arguments, the return
    type, parameters and most namespaces are removed. For example, the name::

        void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>,
        std::array<char *, (unsigned long)1>>(int, T2, T3)

    becomes ``vectorized_elementwise_kernel<FillFunctor>``. Tile sizes are removed from the names of
    cuBLAS's kernels.
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
"""The fields of `KernelCount` that are summed over launches."""


@dataclass(frozen=True)
class KernelCount(Entry):
    """One launch of a kernel in a phase of a step, or the sum of all launches of the kernel."""

    repeat: int  # the index of the step among the measured steps, from 0
    phase: str
    name: str  # demangled, with template arguments and parameters
    launches: int
    read_bytes: Number  # bytes read from DRAM
    write_bytes: Number  # bytes written to DRAM
    l2_bytes: Number  # all bytes that the L2 cache's slices served
    seconds: Number  # from the kernel's start on the GPU to its end

    @property
    def kernel(self) -> str:
        """The kernel's short name, see `short_name`."""
        return short_name(self.name)

    @property
    def dram_bytes(self) -> float:
        """The sum of the bytes read from DRAM and the bytes written to DRAM."""
        return self.read_bytes + self.write_bytes

    def as_row(self) -> dict[str, Any]:
        """Return the fields, the short name and the category as plain JSON types."""
        kind = category(self.name) or "other"
        return {**super().as_row(), "kernel": self.kernel, "category": kind}


def fold(launches: Iterable[KernelCount]) -> tuple[KernelCount, ...]:
    """Add up the launches of each kernel in each step and phase. Sort the sums by DRAM bytes."""
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
    """Add up the counts of kernels, and return the sums as rows of the instrument ``by``.

    There is a row for each metric, step and phase. If ``whole`` is true, all kernels of each step
    were counted, so there are also rows for whole steps.
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
