"""Which GPUs this process may use, and one measurement at a time on each.

Asks the driver through NVML, which creates no CUDA context and needs no torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML knows it; ``memory_bytes`` is the whole card's, None if it does not say.

    ``chip`` is named where it has counters of its own; see `chip_of`.
    """

    uuid: str
    name: str
    memory_bytes: int | None
    driver: str
    chip: str = ""


def chip_of(major: int, minor: int) -> str:
    """The chip behind a compute capability, as far as ncu names its counters in another way.

    12.0 is the GB20x family, whose names are the same; 11.0 (10.1 before CUDA 13) is Jetson Thor.
    """
    return {(12, 0): "GB202", (10, 1): "GB10B", (11, 0): "GB10B"}.get((major, minor), "")


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA will number 0, 1, … in a child of this process.

    Follows ``CUDA_VISIBLE_DEVICES``, by index or UUID, in the order of `child_environment`.
    Empty without a driver. A MIG slice counts as the GPU that it is cut from, because its
    DRAM counters are that GPU's.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = [
            Gpu(
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory_bytes=_memory_bytes(handle),
                driver=driver,
                chip=_chip(handle),
            )
            for handle in handles
        ]
        return select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), _mig_parents(handles, gpus))
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True)
class Use:
    """What else goes on on a GPU: its free memory, B, and processes that compute on it."""

    free_bytes: int | None
    processes: tuple[int, ...]


def in_use(gpu: Gpu) -> Use:
    """How a GPU is used now; nothing is known of it if the driver does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Use(None, ())
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return Use(free, tuple(process.pid for process in running))
    except pynvml.NVMLError:
        return Use(None, ())
    finally:
        pynvml.nvmlShutdown()


def select(gpus: list[Gpu], visible: str | None, mig: dict[str, Gpu] | None = None) -> list[Gpu]:
    """The GPUs that a ``CUDA_VISIBLE_DEVICES`` value picks; CUDA stops at an invalid entry."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        entry = entry.strip()
        found: list[Gpu] = []
        if entry.isdecimal():
            found = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith("GPU-"):
            found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        elif mig and entry in mig:
            found = [mig[entry]]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _mig_parents(handles: list[object], gpus: list[Gpu]) -> dict[str, Gpu]:
    """The GPU behind each MIG slice, by the slice's UUID."""
    import pynvml

    parents: dict[str, Gpu] = {}
    for handle, gpu in zip(handles, gpus, strict=True):
        try:
            count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
            for i in range(count):
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
                parents[_text(pynvml.nvmlDeviceGetUUID(mig))] = gpu
        except pynvml.NVMLError:  # no MIG on this GPU, or no further slice
            continue
    return parents


def _chip(handle: object) -> str:
    import pynvml

    try:
        return chip_of(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except pynvml.NVMLError:
        return ""


def _memory_bytes(handle: object) -> int | None:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # some integrated GPUs do not say
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def child_environment() -> dict[str, str]:
    """What a CUDA process must have set so that its GPU numbers are NVML's.

    CUDA numbers GPUs fastest first unless told otherwise; NVML and nvidia-smi go by bus.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


WAITING = "dpbench: waiting for"
MEASURING = "dpbench: measuring"
"""What a child prints before and after it waits for its GPU; time-outs go by these."""

NVTX_DOMAIN = "dpbench"
"""The NVTX domain of the ranges by which a profiler knows a step's phases."""


NVTX_END = "end"
"""The name of the last range of a run. Nsight Compute's reader takes a truncated report for a
shorter one; a report without this range is incomplete."""


@contextmanager
def exclusive(gpu: Gpu) -> Iterator[None]:
    """Hold a GPU alone among dpbench processes on this machine.

    DRAM counters are device-wide: without this, another case's traffic would be counted.
    The operating system releases the lock when the process ends, however it ends.
    """
    path = Path(tempfile.gettempdir()) / f"dpbench-{gpu.uuid}.lock"
    with FileLock(path, mode=0o666):
        yield
