"""Names of CUDA kernels: short ones that a person can read, and what kind of kernel each is.

The patterns fit the names that PyTorch's eager mode launches, with cuBLAS and CUTLASS under it,
as Nsight Compute demangles them.
"""

from __future__ import annotations

import re
from functools import cache

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
"""Categories and what a kernel's whole name must contain; upper and lower case are the same, and
the first that fits counts. Multi-tensor kernels count as the optimizer's, who launches them."""

OTHER = "other"
"""The category of a kernel that no pattern fits."""

_PATTERNS = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in CATEGORIES)

_WRAPPERS = re.compile(
    r"(Unary|AUnary|BUnary|Binary)Functor|gpu_kernel_impl\w*|at_cuda_detail|cuda_cub"
)
"""Names in template arguments that only wrap another that says what is done."""

_TELLING = re.compile(
    r"\w*?(Functor\w*|functor|Ops|_kernel\w*|KernelImpl|_cuda\w*|_scalar|Epilogue|Agent)"
)
"""Names in template arguments that say what is done."""

_GENERIC = {"Kernel", "Kernel2", "device_kernel", "kernel"}
"""Kernels whose own name says nothing."""


@cache
def category(name: str) -> str:
    """What kind of kernel a demangled name belongs to: one of `CATEGORIES`, or `OTHER`."""
    return matched_category(name) or OTHER


@cache
def matched_category(name: str) -> str | None:
    """The category whose pattern fits a name, or None if none does."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


@cache
def short_name(name: str) -> str:
    """A demangled name with its template arguments folded to the one that says what is done.

    Return type, parameters and most namespaces go as well::

        void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>,
        std::array<char *, (unsigned long)1>>(int, T2, T3)

    becomes ``vectorized_elementwise_kernel<FillFunctor>``, and of cuBLAS's names the tile sizes
    go, which are template arguments by another spelling.
    """
    cleaned = re.sub(r"(<unnamed>|\(anonymous namespace\)|\{anonymous\})::", "", name)
    path, arguments = _split(cleaned)
    base = re.sub(r"_tilesize\w*?_execute(_split_k)?_kernel\w*", r"\1", path.rpartition("::")[2])
    if base in _GENERIC:
        if library := re.match(r"\s*(cutlass_\w+)", arguments):
            return library[1]
        return "::".join(path.split("::")[-2:])
    for word in re.findall(r"[A-Za-z_]\w*", arguments):
        if _TELLING.fullmatch(word) and not _WRAPPERS.fullmatch(word):
            return f"{base}<{word}>"
    return base


def _split(name: str) -> tuple[str, str]:
    """The path of a kernel, ``a::b::kernel``, and what stands between its angle brackets."""
    path, arguments, depth, start = "", "", 0, 0
    for i, character in enumerate(name):
        if character == "<":
            start = start if depth else i + 1
            depth += 1
        elif character == ">" and depth:
            depth -= 1
            arguments = arguments if depth else name[start:i]
        elif depth == 0:
            if character == "(":
                break
            if character == " ":  # before it stood the return type
                path = arguments = ""
            else:
                path += character
    return path or name, arguments
