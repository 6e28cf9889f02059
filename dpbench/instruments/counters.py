"""Errors, libraries, metrics and options of hardware counters, which ncu and cupti share."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError, InstrumentError, unknown
from dpbench.core.metrics import METRICS, Counters, Metric
from dpbench.core.settings import listed, option


class CountersForbidden(InstrumentError):
    """The user may not read the GPU's performance counters."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or allow all users to read the counters with the "
        "driver option NVreg_RestrictProfilingToAdminUsers=0 "
        "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Another program uses the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another dpbench), or run "
        "`dcgmi profile --pause` before and `dcgmi profile --resume` afterwards if DCGM uses the "
        "counters"
    )


class CounterUnknown(InstrumentError):
    """A counter is missing on this GPU or in a report, needs several passes, or has no value."""

    remedy = (
        "choose other counters with --ncu-metrics, from the lists of `dpbench doctor --chip` and "
        "`ncu --query-metrics`"
    )


class ProfilerNotLoaded(InstrumentError):
    """The profiler cannot reach the driver or the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU, that the driver supports the version of the "
        "profiler, and that no virtual machine or sandbox hides the GPU's counters"
    )


# --- libraries -----------------------------------------------------------------------------------

_HELPERS = ("libnvperf_host.so", "libnvperf_target.so")
"""Libraries that libcupti opens by name.

These libraries must be loaded from libcupti's folder before ncu-report loads libraries. The package
ncu-report contains another libnvperf_host, and libcupti 13.0 crashes with that library.
"""


class Driver:
    """The CUDA driver.

    Args:
        functions: the loaded library libcuda, or None on a machine without a driver.
    """

    def __init__(self, functions: Any = None) -> None:
        self._functions = functions

    @classmethod
    def load(cls) -> Driver:
        """Return the driver of this machine."""
        with suppress(OSError):
            return cls(ctypes.CDLL("libcuda.so.1"))
        return cls()

    def version(self) -> tuple[int, int] | None:
        """Return the newest CUDA version that the driver supports, as (major, minor).

        Returns None without a driver.
        """
        version = ctypes.c_int()
        if self._functions is None or self._functions.cuDriverGetVersion(ctypes.byref(version)):
            return None
        return version.value // 1000, version.value % 1000 // 10

    def current_context(self) -> int:
        """Return the handle of this thread's CUDA context."""
        context = ctypes.c_void_p()
        if self._functions is None or self._functions.cuCtxGetCurrent(ctypes.byref(context)):
            raise ProfilerNotLoaded("the CUDA driver did not return a context")
        if context.value is None:
            raise InstrumentError(
                "this thread has no CUDA context: run an operation on the GPU before counting"
            )
        return context.value


def loaded_folders(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """Return the folders of the loaded libcupti libraries. Importing torch loads libcupti."""
    try:
        lines = maps.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list({Path(line[line.index("/") :]).parent for line in lines if "/libcupti.so" in line})


def candidate_folders(sites: Iterable[str] = sys.path) -> Iterator[Path]:
    """Yield folders that may contain libcupti: NVIDIA's Python packages, then the CUDA toolkit."""
    for site in filter(None, sites):
        yield from sorted(Path(site, "nvidia").glob("cu[0-9]*/lib"), reverse=True)
        yield Path(site, "nvidia/cuda_cupti/lib")
    yield Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "extras/CUPTI/lib64")


def cupti_folders() -> list[Path]:
    """Return the folders of the loaded libcupti.

    If libcupti is not loaded, returns the candidate folders that contain libcupti.
    """
    return loaded_folders() or [f for f in candidate_folders() if any(f.glob("libcupti.so*"))]


def load_helpers(folder: Path) -> dict[str, ctypes.CDLL]:
    """Load the libraries that libcupti opens by name from ``folder``, and return them by name."""
    return {name: ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in _HELPERS}


@cache
def load_helpers_first() -> None:
    """Load libcupti's helpers before ncu-report loads other libraries with the same names.

    Without a driver or libcupti, this does nothing.
    """
    if Driver.load().version() and (folder := next(iter(cupti_folders()), None)):
        with suppress(OSError):
            load_helpers(folder)


# --- metrics and options -------------------------------------------------------------------------

ALWAYS = ("dram_read_bytes", "dram_write_bytes")
"""Metrics that are always counted if the chip has counters for them."""


def on_chip(chip: str = "") -> dict[str, Metric]:
    """Return all metrics of ncu for which ``chip`` has counters, by name.

    The chip GH100 counts all built-in metrics of ncu in one pass.
    """
    here = [metric.counted_by(metric.on(chip)) for metric in METRICS.counted("ncu")]
    return {metric.name: metric for metric in here if metric.counters}


def available(
    are_there: Callable[[tuple[str, ...]], bool], instrument: str = "ncu", chip: str = ""
) -> dict[str, Metric]:
    """Return the metrics whose counters exist, by name.

    A metric may have general counters, and other counters for some chips. If the
    general counters exist, the returned metric uses the general counters. Otherwise the returned
    metric uses the counters of the first chip whose counters all exist. A metric without
    general counters needs the counters that are defined for this chip, because counters of another
    chip may exist with another meaning.

    Args:
        are_there: returns True if all of the named counters exist.
        instrument: name of the instrument that counts the metrics.
        chip: name of the chip, or "" if the chip is unknown.
    """
    spelled = [
        metric.counted_by(names)
        for metric in METRICS.counted(instrument)
        for names in (reversed(metric.spellings) if metric.counters else [metric.on(chip)])
    ]
    return {m.name: m for m in spelled if m.counters and are_there(m.counters)}


def resolve(
    names: Iterable[str] | None = None, chip: str = "", ours: Mapping[str, Metric] | None = None
) -> list[Metric]:
    """Return the metrics with these names, and the metrics in `ALWAYS`.

    Args:
        names: names of dpbench's metrics, nvprof's metrics or counters. If None, all metrics are
            returned. Names of counters must end in ``.sum``, because the values of a step's ranges
            are added up.
        chip: name of the GPU's chip, or "" if the chip is unknown.
        ours: all metrics of the GPU, by name. If None, all metrics of the chip are used.
    """
    ours = on_chip(chip) if ours is None else ours
    if names is None:
        return list(ours.values())
    nvprof = {metric.nvprof: metric.name for metric in METRICS.values() if metric.nvprof}
    chosen = {name: ours[name] for name in ALWAYS if name in ours}
    for asked in names:
        name = nvprof.get(asked, asked)
        if name in ours:
            chosen[name] = ours[name]
        elif name in [metric.name for metric in METRICS.counted("ncu")]:
            raise ConfigurationError(f"{chip or 'this GPU'} has no counters for {asked}")
        elif "__" in name and not name.endswith(".sum"):
            raise ConfigurationError(
                f"{name} cannot be added up over the ranges of a step: choose a counter whose "
                f"name ends in .sum, or run ncu itself for rates and averages of single kernels"
            )
        elif "__" in name:
            chosen[name] = Metric(name, how=Counters((name,)))
        else:
            hint = "or a counter that `ncu --query-metrics` lists"
            raise unknown("metric", name, [*ours, *nvprof], hint)
    return list(chosen.values())


def counters(metrics: Iterable[Metric]) -> list[str]:
    """Return the counters of the metrics, without duplicates."""
    return list(dict.fromkeys(c for metric in metrics for c in metric.counters))


@dataclass(frozen=True)
class CounterOptions:
    """Options of Nsight Compute. The instrument cupti also uses ``ncu_metrics``."""

    ncu_path: str | None = option(
        "path of the program ncu, if it is not on PATH", metavar="PROGRAM"
    )
    ncu_metrics: list[str] | None = option(
        "comma-separated names of dpbench's metrics, nvprof's metrics or ncu's counters to count "
        "(default: DRAM, L2 and global load/store bytes)",
        action="append",
        metavar="NAMES",
    )
    ncu_warmup: int = option("number of warm-up steps under ncu", 1, metavar="N")
    ncu_active: int = option("number of measured steps under ncu", 1, metavar="N")

    def __post_init__(self) -> None:
        resolve(self.names, ours={m.name: m for m in METRICS.counted("ncu")})
        Steps(self.ncu_warmup, self.ncu_active)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the requested metrics, or None to request all metrics of the chip."""
        return listed(self.ncu_metrics, "--ncu-metrics", "metric; try dram_read_bytes") or None

    @property
    def steps(self) -> Steps:
        """Numbers of warm-up and measured steps under ncu."""
        return Steps(self.ncu_warmup, self.ncu_active)
