"""Finds libcupti and the libraries that both it and ncu-report load."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.instruments.counters.errors import ProfilerNotLoaded

_HELPERS = ("libnvperf_host.so", "libnvperf_target.so")
"""Libraries that libcupti opens by name. They must be loaded from its own folder first: ncu-report
brings another libnvperf_host, with which libcupti 13.0 crashes."""


class Driver:
    """The CUDA driver. ``functions`` is libcuda, or None if there is none."""

    def __init__(self, functions: Any = None) -> None:
        self._functions = functions

    @classmethod
    def load(cls) -> Driver:
        """The driver of this machine."""
        with suppress(OSError):
            return cls(ctypes.CDLL("libcuda.so.1"))
        return cls()

    def version(self) -> tuple[int, int] | None:
        """The newest CUDA version that the driver supports, (major, minor); None without one."""
        version = ctypes.c_int()
        if self._functions is None or self._functions.cuDriverGetVersion(ctypes.byref(version)):
            return None
        return version.value // 1000, version.value % 1000 // 10

    def current_context(self) -> int:
        """The handle of this thread's CUDA context."""
        context = ctypes.c_void_p()
        if self._functions is None or self._functions.cuCtxGetCurrent(ctypes.byref(context)):
            raise ProfilerNotLoaded("the CUDA driver gives no context")
        if context.value is None:
            raise InstrumentError("this thread has no CUDA context; use the GPU before counting")
        return context.value


def loaded_folders(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """The folder of the libcupti that this process has loaded; importing torch loads one."""
    try:
        lines = maps.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list({Path(line[line.index("/") :]).parent for line in lines if "/libcupti.so" in line})


def candidate_folders(sites: Iterable[str] = sys.path) -> Iterator[Path]:
    """Folders that may have a libcupti: first those beside torch, then the CUDA toolkit."""
    for site in filter(None, sites):
        yield from sorted(Path(site, "nvidia").glob("cu[0-9]*/lib"), reverse=True)
        yield Path(site, "nvidia/cuda_cupti/lib")
    yield Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "extras/CUPTI/lib64")


def cupti_folders() -> list[Path]:
    """The folder of the loaded libcupti; if none is loaded, all folders that have one."""
    return loaded_folders() or [f for f in candidate_folders() if any(f.glob("libcupti.so*"))]


def load_helpers(folder: Path) -> dict[str, ctypes.CDLL]:
    """Load the libraries that libcupti opens by name, from its own folder."""
    return {name: ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in _HELPERS}


@cache
def load_helpers_first() -> None:
    """Load libcupti's helpers, if there is a driver, before other libraries of their names."""
    if Driver.load().version() and (folder := next(iter(cupti_folders()), None)):
        with suppress(OSError):
            load_helpers(folder)
