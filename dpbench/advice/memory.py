"""The largest batch that fits a GPU, by peak memory counted without a GPU."""

from __future__ import annotations

import re
from bisect import bisect_right

from dpbench.advice.footprint import Footprint
from dpbench.core.errors import ConfigurationError

RESERVED = 1.5e9
"""Bytes of a GPU that tensors cannot use: CUDA's context, workspaces of libraries, the driver."""

FRAGMENTATION = 0.04
"""Share of the peak that the allocator loses to fragmentation. It loses the size of the largest
tensor if that is more: a case with less room failed on an H200."""

MAX_BATCH = 4096
"""The largest batch per GPU that is considered."""


def needed(footprint: Footprint, batch_size: int) -> float:
    """Bytes that a GPU must have for a step with this batch size."""
    peak, _ = footprint.peak(batch_size)
    return peak + max(FRAGMENTATION * peak, footprint.largest_tensor(batch_size)) + RESERVED


def largest_batch(footprint: Footprint, memory: float) -> int:
    """The largest batch that fits this memory, at most `MAX_BATCH` per GPU; 0 if none does.

    It is a multiple of micro-batches × GPUs.
    """
    case = footprint.case
    part = case.micro_batches * case.gpus
    sizes = range(part, MAX_BATCH * case.gpus + 1, part)
    return part * bisect_right(sizes, memory, key=lambda size: needed(footprint, size))


def parse_memory(text: str) -> float:
    """Parse ``80GB`` (10⁹ bytes each) or ``80GiB`` (2³⁰)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"memory is e.g. 80GB or 80GiB, not {text!r}")
    return float(match[1]) * (2**30 if match[2].lower() == "gib" else 1e9)
