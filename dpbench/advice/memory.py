"""Finds the largest batch that fits the memory of a GPU. No GPU is needed."""

from __future__ import annotations

import re
from bisect import bisect_right

from dpbench.advice.footprint import Footprint
from dpbench.core.errors import ConfigurationError

RESERVED = 1.5e9
"""Bytes of GPU memory that are assumed for CUDA's context, the driver and libraries."""

FRAGMENTATION = 0.04
"""Share of the peak memory that the allocator is assumed to lose to fragmentation. The assumed loss
is at least the size of the largest tensor."""

MAX_BATCH = 4096
"""The largest batch per GPU that `largest_batch` considers."""


def needed(footprint: Footprint, batch_size: int) -> float:
    """Return the bytes of GPU memory that a step with this batch size needs."""
    peak, _ = footprint.peak(batch_size)
    return peak + max(FRAGMENTATION * peak, footprint.largest_tensor(batch_size)) + RESERVED


def largest_batch(footprint: Footprint, memory: float) -> int:
    """Return the largest batch size that fits the memory of each GPU, or 0 if none fits.

    The batch size is at most `MAX_BATCH` for each GPU. It is a multiple of the number of GPUs times
    the number of micro-batches.
    """
    case = footprint.case
    part = case.micro_batches * case.gpus
    sizes = range(part, MAX_BATCH * case.gpus + 1, part)
    return part * bisect_right(sizes, memory, key=lambda size: needed(footprint, size))


def parse_memory(text: str) -> float:
    """Return the bytes of ``80GB`` (1 GB is 10⁹ bytes) or ``80GiB`` (1 GiB is 2³⁰ bytes)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"write memory as 80GB or 80GiB, not as {text!r}")
    return float(match[1]) * (2**30 if match[2].lower() == "gib" else 1e9)
