"""Finds libcupti, and loads the libraries that libcupti and ncu-report both need."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters.errors import ProfilerNotLoaded

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
