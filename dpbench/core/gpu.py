"""Lists the GPUs that this process may use, and locks each for one measurement at a time.

Asks the driver through NVML, which creates no CUDA context and needs no torch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, locked


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML knows it."""

    uuid: str
    name: str
    memory_bytes: int | None  # the card's or, if it is cut into MIG slices, the slice's
    driver: str
    chip: str = ""  # the chip, see chip_of
    free_bytes: int | None = field(default=None, compare=False)  # when the driver was asked
    processes: tuple[int, ...] = field(default=(), compare=False)  # that computed on it

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies it, without its load."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


def chip_of(major: int, minor: int) -> str:
    """The chip behind a compute capability, or the first of several with the same counters.

    11.0 (10.1 before CUDA 13) is Jetson Thor, 12.1 DGX Spark; "" for a chip that is not listed.
    """
    return _CHIPS.get((major, minor), "")


_CHIPS = {
    (7, 0): "GV100",
    (7, 5): "TU102",
    (8, 0): "GA100",
    (8, 6): "GA102",
    (8, 7): "GA10B",
    (8, 9): "AD102",
    (9, 0): "GH100",
    (10, 0): "GB100",
    (10, 1): "GB10B",
    (10, 3): "GB110",
    (11, 0): "GB10B",
    (12, 0): "GB202",
    (12, 1): "GB20B",
}


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA will number 0, 1, … in a child of this process.

    Follows ``CUDA_VISIBLE_DEVICES``, by index or UUID, in the order of `child_environment`.
    Empty without a driver that answers. A MIG slice counts as the GPU that it is cut from,
    because its DRAM counters are that GPU's, but has memory of its own. If a GPU with slices is
    listed as a whole, CUDA takes its first slice.
    """
    return _asked_driver()[0]


def chip_here() -> str:
    """The chip of the first GPU; see `Gpu.chip`."""
    return next((gpu.chip for gpu in visible_gpus()), "")


def why_no_gpu() -> str:
    """The driver's message if `visible_gpus` is empty."""
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
    """The visible GPUs, or an empty list and the driver's complaint.

    If one of several GPUs has failed, CUDA's numbers are unknown, so the list is empty.
    """
    import pynvml as nvml

    try:
        with ExitStack() as ending:
            nvml.nvmlInit()
            ending.callback(nvml.nvmlShutdown)
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [_described(nvml, handle) for handle in handles]
            slices: dict[str, Gpu] = {}
            for number, handle in enumerate(handles):
                own = dict(_slices(nvml, handle, gpus[number]))
                gpus[number] = next(iter(own.values()), gpus[number])
                slices |= own
    except nvml.NVMLError as error:
        return [], f"NVML says {str(error)!r}"
    return select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), slices), ""


def _described(nvml: Any, handle: object) -> Gpu:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    said = {"memory_bytes": None, **_memory(nvml, handle)}
    with suppress(nvml.NVMLError):
        said["chip"] = chip_of(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    with suppress(nvml.NVMLError):
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        said["processes"] = tuple(process.pid for process in running)
    return Gpu(uuid, name, driver=nvml.nvmlSystemGetDriverVersion(), **said)


def _memory(nvml: Any, handle: object) -> dict[str, Any]:
    with suppress(nvml.NVMLError):  # some integrated GPUs do not say
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_bytes": int(memory.total), "free_bytes": int(memory.free)}
    return {}


def _slices(nvml: Any, handle: object, gpu: Gpu) -> Iterator[tuple[str, Gpu]]:
    """The UUID of each MIG slice, and the GPU with the slice's memory."""
    with suppress(nvml.NVMLError):  # no MIG on this GPU, or no further slice
        for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            yield nvml.nvmlDeviceGetUUID(mig), replace(gpu, **_memory(nvml, mig))


def select(gpus: list[Gpu], visible: str | None, mig: Mapping[str, Gpu] | None = None) -> list[Gpu]:
    """The GPUs that a ``CUDA_VISIBLE_DEVICES`` value picks; CUDA stops at an invalid entry."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            fitting = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith("GPU-"):
            fitting = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        else:
            fitting = [gpu for uuid, gpu in (mig or {}).items() if uuid == entry]
        if len(fitting) != 1:
            break
        chosen += fitting
    return chosen


SESSION_GPUS = "DPBENCH_GPUS"
"""The environment variable with all GPUs of a session, in a worker that sees only its own."""


def visible_to_case(gpus: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that needs this many GPUs, more than the worker's own.

    They follow the worker's GPU in the session's list; if there are too few, all are used.
    """
    own, every = (
        environment.get("CUDA_VISIBLE_DEVICES"),
        environment.get(SESSION_GPUS, "").split(","),
    )
    if gpus < 2 or own not in every:
        return {}
    first = every.index(own)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*every[first:], *every[:first]][:gpus])}


def number_of_gpus() -> int:
    """How many GPUs the session may use; a worker sees one of them."""
    return len(every.split(",")) if (every := os.environ.get(SESSION_GPUS)) else len(visible_gpus())


def child_environment() -> dict[str, str]:
    """The environment in which CUDA numbers GPUs as NVML does.

    CUDA numbers GPUs fastest first unless told otherwise; NVML and nvidia-smi go by bus.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


POLL_SECONDS = 0.05


@contextmanager
def lock_gpu(
    gpu: Gpu, purpose: str = "", waiting: Callable[[str], object] = lambda holder: None
) -> Iterator[None]:
    """Lock a GPU against other dpbench processes on this machine.

    DRAM counters are device-wide: without this, another case's traffic would be counted.
    The operating system releases the lock when the process ends, however it ends. The file is not
    removed: a process that waits for a removed file would not notice a new one.

    The lock file says the ``purpose``, such as a case's id. ``waiting`` is called with what the
    file says each time that another process holds the GPU.
    """
    path, reported = Path(tempfile.gettempdir()) / f"dpbench-{gpu.uuid}.lock", ""
    with ExitStack() as held:
        while True:
            try:
                file = held.enter_context(locked(path, wait=False))
                break
            except Locked as error:
                holder = str(error)
            if holder.endswith("\n") and holder != reported:  # otherwise not written yet
                waiting(holder.strip())
                reported = holder
            time.sleep(POLL_SECONDS)
        if file is None:
            raise ConfigurationError(
                f"{path} cannot be locked; set TMPDIR to another folder, on a local disk"
            )
        os.ftruncate(file, 0)  # left by a killed process
        since = time.strftime("%H:%M:%S")
        os.pwrite(file, f"process {os.getpid()} ({purpose}) since {since}\n".encode(), 0)
        yield
        os.ftruncate(file, 0)


@contextmanager
def lock_gpus(
    gpus: Iterable[Gpu], purpose: str, waiting: Callable[[Gpu, str], object]
) -> Iterator[None]:
    """Lock several GPUs, each as `lock_gpu` does; ``waiting`` is called with the GPU as well.

    Every process takes its locks in the same order, so that no two wait for each other.
    """
    with ExitStack() as held:
        once = {gpu.uuid: gpu for gpu in gpus}  # two slices may share a GPU
        for _, gpu in sorted(once.items()):
            held.enter_context(lock_gpu(gpu, purpose, partial(waiting, gpu)))
        yield
