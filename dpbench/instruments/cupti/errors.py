"""Errors of CUPTI alone."""

from __future__ import annotations

from dpbench.instruments.interface import InstrumentError


class CountersUnsupported(InstrumentError):
    """The GPU is set up in a way that has no counters."""

    remedy = "use a whole GPU that is not virtualised, split or in confidential-computing mode"


class CountersDoNotCombine(InstrumentError):
    """Counters that cannot be read in the same pass."""

    remedy = "count them one after another"


class CuptiUnusable(InstrumentError):
    """There is no libcupti here that can count ranges on this GPU with this driver."""

    remedy = (
        "PyTorch's wheels bring one: use a build of torch for CUDA 12.6.2 or newer that knows this "
        "GPU, and no newer than the driver supports (nvidia-smi shows that), or update the driver; "
        "beside another build, install nvidia-cuda-cupti for its version of CUDA"
    )


class CuptiError(InstrumentError):
    """A function of CUPTI failed for a reason that has no remedy of its own."""


class RangesLost(InstrumentError):
    """Not every range that was begun was counted."""

    remedy = "count fewer ranges at a time, or raise max_ranges"


class StepsDiffer(InstrumentError):
    """Steps that should be equal differ, so their counts cannot be put together."""

    remedy = "warm up longer, give every step the same shapes, and keep other processes off the GPU"
