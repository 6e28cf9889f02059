"""Whether a case can fit a GPU, from its predicted peak memory, before it costs GPU time."""

from __future__ import annotations

from typing import ClassVar

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.gpu import Gpu
from dpbench.instruments.base import InstrumentError
from dpbench.results.operators import guesses
from dpbench.results.rows import STEP

COUNTING_SECONDS = 60.0
"""After this, an outside trainer is taken not to be countable; a 1b case takes up to 7 s."""


class DoesNotFit(InstrumentError):
    """The case needs more memory than the GPU has; it was not started."""

    remedy: ClassVar[str] = "use a smaller case or a larger GPU, or try anyway"


def check_fits(case: Case, gpu: Gpu | None) -> None:
    """Refuse a case whose tensors alone need more than the GPU's whole memory.

    The peak is counted without hardware (`dpbench.instruments.logical`); on an NVIDIA H200 it
    came within 1.1 % of what PyTorch's allocator had handed out. The CUDA context and
    fragmentation come on top, so a case that passes may still run out of memory. Nothing is
    refused without a GPU that says how much memory it has, of what cannot be counted, nor where
    operators without a rule of their own weigh in the count.
    """
    if gpu is None or gpu.memory_bytes is None:
        return
    try:
        needed = predicted_peak_bytes(case)
    except DpbenchError:
        return
    if needed is not None and needed > gpu.memory_bytes:
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needed / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )


def predicted_peak_bytes(case: Case) -> int | None:
    """The most bytes that the tensors of a step take at once; None if that would be a guess."""
    from dpbench.instruments.logical.instrument import Logical  # loads torch

    counting = Logical(timeout=COUNTING_SECONDS).start(case)
    try:
        rows = counting.rows()
    finally:
        counting.cancel()
    peak = next(row for row in rows if (row.phase, row.metric) == (STEP, "peak_memory_bytes"))
    return None if guesses(counting.operators) else int(peak.value)
