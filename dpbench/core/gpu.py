"""Lists the GPUs that this process may use, and locks a GPU for one measurement at a time.

The list comes from NVML, which creates no CUDA context and needs no torch.
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
from dpbench.core.metrics import CLOCK_REASONS, SM_CLOCK


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML describes it.

    Args:
        uuid: the identifier of the GPU.
        name: the name of the GPU, as NVML spells it.
        memory_bytes: the memory of the GPU, or of the MIG slice that CUDA uses; None if unknown.
        driver: the version of the driver.
        chip: the name of the chip, such as ``GH100``, see `chip_of`.
        free_bytes: the free memory at the time of the query.
        processes: the ids of processes that computed on the GPU at the time of the query.
    """

    uuid: str
    name: str
    memory_bytes: int | None
    driver: str
    chip: str = ""
    free_bytes: int | None = field(default=None, compare=False)
    processes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that identify the GPU, without its current load."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


def chip_of(major: int, minor: int) -> str:
    """Return the name of the chip with a compute capability, or "" if none is known.

    If several chips share a compute capability, returns one of them, because the hardware counters
    of these chips are assumed to be the same. Compute capability 11.0 (10.1 before CUDA 13) is
    Jetson Thor, and 12.1 is DGX Spark.
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
    """Return the GPUs that CUDA will number 0, 1, … in a child of this process.

    ``CUDA_VISIBLE_DEVICES`` selects the GPUs. GPUs are sorted by PCI bus, as in CUDA with the
    variables of `child_environment`. If the user has set ``CUDA_DEVICE_ORDER``, CUDA's order may
    differ. The list is empty if NVML reports an error.

    An entry for a MIG slice has the memory of the slice. Its other fields describe the whole GPU,
    because DRAM counters cover the whole GPU. If a GPU with slices is selected as a whole, CUDA
    uses the first slice, so the entry has the memory of the first slice.
    """
    return _query_driver()[0]


def chip_here() -> str:
    """Return the chip of the first visible GPU, or "" without a GPU."""
    return next((gpu.chip for gpu in visible_gpus()), "")


def why_no_gpu() -> str:
    """Return the reason why `visible_gpus` is empty, with the value of CUDA_VISIBLE_DEVICES."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = _query_driver()[1] or "NVML shows none"
    return said if hidden is None else f"{said} (CUDA_VISIBLE_DEVICES is {hidden!r})"


def require_gpu() -> None:
    """Raise `ConfigurationError` if no GPU is visible."""
    if not visible_gpus():
        raise ConfigurationError(
            f"no CUDA GPU is visible here: {why_no_gpu()}; nvidia-smi lists the machine's GPUs, "
            f"and --instrument logical counts without a GPU"
        )


def _query_driver() -> tuple[list[Gpu], str]:
    """Return the visible GPUs and "", or an empty list and NVML's error message.

    If NVML fails for one of several GPUs, the list is empty, because the numbers that CUDA gives to
    the other GPUs are unknown.
    """
    import pynvml as nvml

    try:
        with ExitStack() as ending:
            nvml.nvmlInit()
            ending.callback(nvml.nvmlShutdown)
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [_gpu_info(nvml, handle) for handle in handles]
            slices: dict[str, Gpu] = {}
            for number, handle in enumerate(handles):
                own = dict(_slices(nvml, handle, gpus[number]))
                gpus[number] = next(iter(own.values()), gpus[number])
                slices |= own
    except nvml.NVMLError as error:
        return [], f"NVML says {str(error)!r}"
    return select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), slices), ""


def _gpu_info(nvml: Any, handle: object) -> Gpu:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    said = {"memory_bytes": None, **_memory(nvml, handle)}
    with suppress(nvml.NVMLError):
        said["chip"] = chip_of(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    with suppress(nvml.NVMLError):
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        said["processes"] = tuple(process.pid for process in running)
    return Gpu(uuid, name, driver=nvml.nvmlSystemGetDriverVersion(), **said)


def _memory(nvml: Any, handle: object) -> dict[str, Any]:
    with suppress(nvml.NVMLError):  # some integrated GPUs do not report their memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_bytes": int(memory.total), "free_bytes": int(memory.free)}
    return {}


def _slices(nvml: Any, handle: object, gpu: Gpu) -> Iterator[tuple[str, Gpu]]:
    """Yield for each MIG slice its UUID, and a copy of ``gpu`` that has the slice's memory."""
    with suppress(nvml.NVMLError):  # no MIG on this GPU, or no further slice
        for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            yield nvml.nvmlDeviceGetUUID(mig), replace(gpu, **_memory(nvml, mig))


def select(gpus: list[Gpu], visible: str | None, mig: Mapping[str, Gpu] | None = None) -> list[Gpu]:
    """Return the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` selects.

    The first invalid entry and all later entries are ignored, as CUDA does. ``mig`` maps the UUIDs
    of MIG slices to GPUs.
    """
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


def clock_reader(uuid: str) -> Callable[[], dict[str, float]]:
    """Return a function that reads the SM clock of a GPU in Hz, and what limits it, by metric.

    The function takes about 0.1 ms. It reads no metrics if NVML refuses, as for MIG slices.
    """
    import pynvml as nvml

    def read() -> dict[str, float]:
        with suppress(nvml.NVMLError):
            hertz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            return {SM_CLOCK: hertz, **limited_by(reasons)}
        return {}

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return dict
    return read


def limited_by(reasons: int) -> dict[str, float]:
    """Return for each metric in `CLOCK_REASONS` 1 if NVML's bit mask has the reason, else 0."""
    import pynvml as nvml

    return {
        metric: float(
            any(reasons & getattr(nvml, f"nvmlClocksEventReason{each}") for each in names)
        )
        for metric, names in CLOCK_REASONS.items()
    }


SESSION_GPUS = "DPBENCH_GPUS"
"""Environment variable in workers of pytest-xdist. It lists all GPUs of the session, because the
``CUDA_VISIBLE_DEVICES`` of a worker lists only one GPU."""


def visible_to_case(gpus: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables with which a worker's child sees several GPUs of the session.

    The first GPU is the worker's own GPU. The next GPUs are those after it in the session's list.
    After the last GPU, the list starts again with its first GPU. If the session has fewer GPUs than
    requested, the child sees all of them. Returns no variables if one GPU is requested, or if this
    process is not a worker of pytest-xdist.
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
    """Return the number of GPUs of the session, also in a worker that sees only one GPU."""
    return len(every.split(",")) if (every := os.environ.get(SESSION_GPUS)) else len(visible_gpus())


def child_environment() -> dict[str, str]:
    """Return environment variables with which CUDA numbers GPUs in the order of NVML.

    Returns no variables if the user has set ``CUDA_DEVICE_ORDER``. By default, CUDA gives number 0
    to the fastest GPU, whereas NVML and nvidia-smi sort GPUs by PCI bus.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


POLL_SECONDS = 0.05


@contextmanager
def lock_gpu(
    gpu: Gpu, purpose: str = "", waiting: Callable[[str], object] = lambda holder: None
) -> Iterator[None]:
    """Lock a GPU against other dpbench processes on this machine.

    DRAM counters cover the whole GPU. Without the lock, they would also count the bytes of another
    dpbench process. The operating system releases the lock if this process dies. The lock file is
    not removed.

    Args:
        gpu: the GPU to lock.
        purpose: a text for the lock file, e.g. a case's id, which tells other processes why the GPU
            is locked.
        waiting: called once for each other process that holds the lock, with the text of the lock
            file.

    Raises:
        ConfigurationError: the lock file cannot be opened or locked.
    """
    path, reported = Path(tempfile.gettempdir()) / f"dpbench-{gpu.uuid}.lock", ""
    with ExitStack() as held:
        while True:
            try:
                file = held.enter_context(locked(path, wait=False))
                break
            except Locked as error:
                holder = str(error)
            # A text without a line break is incomplete.
            if holder.endswith("\n") and holder != reported:
                waiting(holder.strip())
                reported = holder
            time.sleep(POLL_SECONDS)
        if file is None:
            raise ConfigurationError(
                f"{path} cannot be locked; set TMPDIR to another folder, on a local disk"
            )
        os.ftruncate(file, 0)  # removes the text of a process that was killed
        since = time.strftime("%H:%M:%S")
        os.pwrite(file, f"process {os.getpid()} ({purpose}) since {since}\n".encode(), 0)
        yield
        os.ftruncate(file, 0)


@contextmanager
def lock_gpus(
    gpus: Iterable[Gpu], purpose: str, waiting: Callable[[Gpu, str], object]
) -> Iterator[None]:
    """Lock several GPUs with `lock_gpu`. The first argument of ``waiting`` is the locked GPU.

    GPUs are locked in the order of their UUIDs. With one order for all processes, two processes
    never wait for each other.
    """
    with ExitStack() as held:
        once = {gpu.uuid: gpu for gpu in gpus}  # two slices may belong to one GPU
        for _, gpu in sorted(once.items()):
            held.enter_context(lock_gpu(gpu, purpose, partial(waiting, gpu)))
        yield
