"""Which GPUs this process may use, and one measurement at a time on each.

Asks the driver through NVML, which creates no CUDA context and needs no torch.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError


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
    Empty without a driver that answers. A MIG slice counts as the GPU that it is cut from,
    because its DRAM counters are that GPU's.
    """
    return _asked_driver()[0]


def chip_here() -> str:
    """The chip of the first GPU; see `Gpu.chip`."""
    return next((gpu.chip for gpu in visible_gpus()), "")


def why_no_gpu() -> str:
    """What the driver says, where `visible_gpus` is empty."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = _asked_driver()[1] or "NVML shows none"
    return said if hidden is None else f"{said} (CUDA_VISIBLE_DEVICES is {hidden!r})"


def require_gpu() -> None:
    """Refuse to go on without a GPU."""
    if not visible_gpus():
        raise ConfigurationError(
            f"no CUDA GPU is visible here: {why_no_gpu()}; nvidia-smi lists what is"
        )


def _asked_driver() -> tuple[list[Gpu], str]:
    """The visible GPUs, or none and what the driver complains of.

    Of several GPUs one may have failed: CUDA's numbers are unknown then, so none is named.
    """
    with _nvml() as pynvml:
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            gpus = [_described(handle) for handle in handles]
        except pynvml.NVMLError as error:
            return [], f"NVML says {str(error)!r}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return select(gpus, visible, _mig_parents(handles, gpus)), ""


def _described(handle: object) -> Gpu:
    import pynvml

    memory = capability = None
    with suppress(pynvml.NVMLError):  # some integrated GPUs do not say
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    with suppress(pynvml.NVMLError):
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory,
        driver=pynvml.nvmlSystemGetDriverVersion(),
        chip=chip_of(*capability) if capability else "",
    )


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's library, shut down at the end if it was initialised."""
    import pynvml

    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass(frozen=True)
class Use:
    """What else goes on on a GPU: its free memory, B, and processes that compute on it."""

    free_bytes: int | None
    processes: tuple[int, ...]


def in_use(gpu: Gpu) -> Use:
    """How a GPU is used now; nothing is known of it if the driver does not say."""
    with _nvml() as pynvml:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return Use(None, ())
        return Use(free, tuple(process.pid for process in running))


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
        with suppress(pynvml.NVMLError):  # no MIG on this GPU, or no further slice
            for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
                parents[pynvml.nvmlDeviceGetUUID(mig)] = gpu
    return parents


def child_environment() -> dict[str, str]:
    """What a CUDA process must have set so that its GPU numbers are NVML's.

    CUDA numbers GPUs fastest first unless told otherwise; NVML and nvidia-smi go by bus.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


POLL_SECONDS = 0.05


@contextmanager
def exclusive(
    gpu: Gpu, purpose: str = "", waiting: Callable[[str], object] = lambda holder: None
) -> Iterator[None]:
    """Hold a GPU alone among dpbench processes on this machine.

    DRAM counters are device-wide: without this, another case's traffic would be counted.
    The operating system releases the lock when the process ends, however it ends. Its file holds
    who has it, and stays: whoever waits for a removed file would not see who made the next.

    Args:
        gpu: which.
        purpose: what others are told who wait for it, such as a case's id.
        waiting: is told whom this process waits for, whenever that is another one.
    """
    path = Path(tempfile.gettempdir()) / f"dpbench-{gpu.uuid}.lock"
    create = 0 if path.exists() else os.O_CREAT  # which Linux may refuse for another user's file
    try:
        file = os.open(path, os.O_RDWR | create, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}; set TMPDIR to another folder"
        ) from error
    try:
        with suppress(PermissionError):
            os.fchmod(file, 0o666)  # for every user, whatever the umask
        told = ""
        while not _locked(file):
            holder = os.pread(file, 1000, 0).decode(errors="replace")
            if holder.endswith("\n") and holder != told:  # else it is still to be written
                waiting(holder.strip())
                told = holder
            time.sleep(POLL_SECONDS)
        os.ftruncate(file, 0)  # of one that was killed
        since = time.strftime("%H:%M:%S")
        os.pwrite(file, f"process {os.getpid()} ({purpose}) since {since}\n".encode(), 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigurationError(
            f"{tempfile.gettempdir()} has no file locks ({error.strerror}); "
            f"set TMPDIR to a folder on a local disk"
        ) from error
    return True
