"""Finds the largest batch that fits a GPU, from peak memory counted without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dpbench.child.failures import CaseRefused
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.results.kernels import guesses
from dpbench.results.rows import STEP

RESERVED = 1.5e9
"""Bytes of a GPU that tensors cannot use: CUDA's context, workspaces of libraries, the driver."""

FRAGMENTATION = 0.04
"""Share of the peak that the allocator loses to fragmentation. It loses the size of the largest
tensor if that is more: a case with less room failed on an H200."""

MAX_BATCH = 4096
"""The largest batch per GPU that is tried."""


@dataclass(frozen=True)
class Needed:
    """Peak memory of a case's tensors, in bytes, and the phase of the peak."""

    memory: float
    phase: str
    guessed: bool = False
    """Whether operators without a rule of their own have a share in the count that matters."""
    largest: float = 0.0
    """Bytes of the largest tensor of a step."""

    @property
    def total(self) -> float:
        """Bytes that a GPU must have."""
        return self.memory + max(FRAGMENTATION * self.memory, self.largest) + RESERVED

    def fits(self, memory: float) -> bool:
        """Whether so many bytes of GPU memory are enough."""
        return self.total <= memory


def needed(case: Case) -> Needed:
    """Count the peak memory of a case.

    Raises:
        CaseRefused: the trainer refuses the case, as it would on a GPU.
        DpbenchError: the case cannot be counted.
    """
    from dpbench.instruments.logical.logical import Logical

    counting = Logical().start(case)
    try:
        rows = counting.rows()
    except CaseRefused:
        raise
    except ConfigurationError as error:
        raise CaseRefused(f"{case.id}: {error}") from error
    finally:
        counting.cancel()
    peaks = [row for row in rows if row.metric == "peak_memory_bytes"]
    # The peak of a step equals that of a phase; prefer the phase, which says where it is.
    highest = max(peaks, key=lambda row: (row.value, row.phase != STEP))
    largest = max((r.value for r in rows if r.metric == "largest_tensor_bytes"), default=0.0)
    return Needed(highest.value, highest.phase, bool(guesses(counting.operators)), largest)


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, 0 if none does, and the memory that it needs."""

    batch_size: int
    needs: Needed
    """Memory of the largest batch; if none fits, of the smallest."""
    unbounded: bool = False
    """Whether even `MAX_BATCH` fits, so that the largest batch is unknown."""


def largest_batch(
    case: Case, memory: float, count: Callable[[Case], Needed] = needed
) -> LargestBatch:
    """Find the largest batch whose peak memory fits.

    Peak memory is nearly linear in the batch size, with another slope wherever another phase has
    the peak. So the search interpolates between counted batches until one fits and the next does
    not. Batches are multiples of micro-batches × GPUs.

    Args:
        case: its own batch size is ignored.
        memory: bytes of the GPU.
        count: counts the memory of a case.
    """
    part = case.micro_batches * case.gpus
    counted: dict[int, Needed] = {}

    def needs(parts: int) -> Needed:
        if parts not in counted:
            counted[parts] = count(replace(case, batch_size=parts * part))
        return counted[parts]

    limit = MAX_BATCH // case.micro_batches
    fits, most = 0, limit + 1  # the largest known to fit, the smallest known not to
    tried = 1
    while True:
        if needs(tried).fits(memory):
            fits = tried
        else:
            most = tried
        if most - fits <= 1:
            break
        tried = 2 if len(counted) == 1 else _guess(counted, fits, most, memory)
        tried = min(max(tried, fits + 1), most - 1)
    unbounded = most > limit
    return LargestBatch(fits * part, needs(fits or 1), unbounded)


def _guess(counted: Mapping[int, Needed], fits: int, most: int, memory: float) -> int:
    """Interpolate the batch that needs ``memory``, between its neighbours or from the last two."""
    low, high = (fits, most) if {fits, most} <= counted.keys() else sorted(counted)[-2:]
    slope = (counted[high].total - counted[low].total) / (high - low)
    free = memory - counted[low].total
    return low + int(free / slope) if slope > 0 else MAX_BATCH


def parse_memory(text: str) -> float:
    """Parse ``80GB`` (10⁹ bytes each) or ``80GiB`` (2³⁰)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"memory is e.g. 80GB or 80GiB, not {text!r}")
    return float(match[1]) * (2**30 if match[2].lower() == "gib" else 1e9)
