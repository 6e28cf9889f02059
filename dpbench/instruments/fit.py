"""Whether a case can fit a GPU, from its predicted peak memory, before it costs GPU time."""

from __future__ import annotations

from typing import ClassVar

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.gpu import Gpu
from dpbench.instruments.base import InstrumentError
from dpbench.results.rows import STEP


class DoesNotFit(InstrumentError):
    """The case needs more memory than the GPU has; it was not started."""

    remedy: ClassVar[str] = "use a smaller case or a larger GPU, or try anyway"


def check_fits(case: Case, gpu: Gpu | None) -> None:
    """Refuse a case whose tensors alone need more than the GPU's whole memory.

    The peak is counted without hardware (`dpbench.instruments.logical`); on an NVIDIA H200 it
    came within 1.1 % of what PyTorch's allocator had handed out. The CUDA context and
    fragmentation come on top, so a case that passes may still run out of memory.

    Args:
        case: what shall run.
        gpu: where; without one, or if it does not say how much memory it has, nothing is refused.

    Raises:
        DoesNotFit: it cannot; the message says what it needs and what there is.
    """
    if gpu is None or gpu.memory_bytes is None:
        return
    try:
        needed = predicted_peak_bytes(case)
    except DpbenchError:  # what cannot be counted may run all the same
        return
    if needed > gpu.memory_bytes:
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needed / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )


def predicted_peak_bytes(case: Case) -> int:
    """The most bytes that the tensors of a step take at once.

    Raises:
        DpbenchError: the case cannot be counted.
    """
    from dpbench.instruments.logical import Logical  # loads torch

    peaks = (
        row.value
        for row in Logical().measure(case)
        if (row.phase, row.metric) == (STEP, "peak_memory_bytes")
    )
    return int(next(peaks))
