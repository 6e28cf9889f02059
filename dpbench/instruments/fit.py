"""Whether a case can fit a GPU, from its predicted peak memory, before it costs GPU time."""

from __future__ import annotations

from typing import ClassVar

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.gpu import Gpu
from dpbench.instruments.base import InstrumentError
from dpbench.results.operators import guesses

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
    from dpbench.instruments.logical.instrument import Logical  # loads torch

    counting = Logical(timeout=COUNTING_SECONDS).start(case)
    try:
        rows = counting.rows()
    except DpbenchError:
        return
    finally:
        counting.cancel()
    needed = max(row.value for row in rows if row.metric == "peak_memory_bytes")
    if needed > gpu.memory_bytes and not guesses(counting.operators):
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needed / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )
