"""Which cases fit a GPU, by peak memory that is counted without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dpbench.child.failures import CaseRefused
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.results.kernels import guesses
from dpbench.results.rows import STEP

CONTEXT = 1.5e9
"""Bytes of a GPU that tensors cannot have: CUDA's context, libraries' workspaces, the driver's."""

FRAGMENTS = 0.04
"""The part of the peak that the allocator needs besides, because free blocks have other sizes; it
needs room for the largest tensor, if that is more: a case with less failed on an H200."""

MOST = 4096
"""The largest batch of a GPU that is tried."""


@dataclass(frozen=True)
class Needed:
    """The most memory that a case's tensors take at once, in bytes, and in which phase."""

    memory: float
    phase: str
    guessed: bool = False
    """Whether operators without a rule of their own weigh in the count."""
    largest: float = 0.0
    """Bytes of the largest tensor that a step makes."""

    @property
    def in_all(self) -> float:
        """The bytes that a GPU must have."""
        return self.memory + max(FRAGMENTS * self.memory, self.largest) + CONTEXT

    def fits(self, memory: float) -> bool:
        """Whether that much memory is enough."""
        return self.in_all <= memory


def needed(case: Case) -> Needed:
    """Count the peak memory of a case; refused as it would be on the GPU.

    Raises:
        CaseRefused: its trainer does not take it.
        DpbenchError: it cannot be counted.
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
    # The step's own is the largest of its phases': the first of those says where.
    highest = max(peaks, key=lambda row: (row.value, row.phase != STEP))
    largest = max((r.value for r in rows if r.metric == "largest_tensor_bytes"), default=0.0)
    return Needed(highest.value, highest.phase, bool(guesses(counting.operators)), largest)


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, 0 if none does, and what it needs."""

    batch_size: int
    needs: Needed
    """What the largest batch needs; if none fits, what the smallest does."""
    unbounded: bool = False
    """Whether `MOST` fits as well, so that the largest is not known."""


def largest_batch(case: Case, memory: float, need: Callable[[Case], Needed] = needed) -> Largest:
    """The largest batch of a case, whatever its own is, whose peak fits.

    Peak memory grows with the batch nearly along straight lines, of which another phase begins the
    next: each count says where the line would meet the memory, until a batch fits whose next does
    not. A batch is a multiple of the number of micro-batches, on each of several GPUs.

    Args:
        case: its batch size does not matter.
        memory: bytes of the GPU.
        need: says what a case needs.
    """
    part = case.micro_batches * case.gpus
    counted: dict[int, Needed] = {}

    def needs(parts: int) -> Needed:
        if parts not in counted:
            counted[parts] = need(replace(case, batch_size=parts * part))
        return counted[parts]

    limit = MOST // case.micro_batches
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
    return Largest(fits * part, needs(fits or 1), unbounded)


def _guess(counted: Mapping[int, Needed], fits: int, most: int, memory: float) -> int:
    """Where the line through the counts on both sides of the memory, or the last two, meets it."""
    low, high = (fits, most) if {fits, most} <= counted.keys() else sorted(counted)[-2:]
    slope = (counted[high].in_all - counted[low].in_all) / (high - low)
    free = memory - counted[low].in_all
    return low + int(free / slope) if slope > 0 else MOST


def parse_memory(text: str) -> float:
    """Bytes of ``80GB`` (10⁹) or ``80GiB`` (2³⁰)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"memory is e.g. 80GB or 80GiB, not {text!r}")
    return float(match[1]) * (2**30 if match[2].lower() == "gib" else 1e9)
