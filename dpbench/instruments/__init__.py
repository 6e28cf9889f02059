"""How it is measured: one file per instrument, behind the interface in ``base``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.gpu import visible_gpus
from dpbench.instruments.base import Instrument
from dpbench.instruments.child import Steps
from dpbench.instruments.ncu.kernel_choice import KernelChoice
from dpbench.instruments.ncu.metrics import on_chip, resolve
from dpbench.instruments.ncu.ranges import Ncu, find_ncu
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler.instrument import TorchProfiler
from dpbench.process.schedule import Schedule

INSTRUMENTS = ("timing", "ncu", "ncu_kernels", "logical", "torch_profiler")
"""The names of the instruments."""

ON_GPU = ("timing", "ncu")
"""What measures a case on a GPU: times without a profiler, and bytes with it."""


def choose(
    names: Iterable[str],
    *,
    directory: Path,
    ncu_path: str | None = None,
    metrics: Iterable[str] | None = None,
    device: str = "cuda",
    timing_steps: Steps = Timing.steps,
    ncu_steps: Steps = Ncu.steps,
    timeout: float = Timing.timeout,
    kernels: KernelChoice | None = None,
    profile_directory: Path = TorchProfiler.directory,
    profile_schedule: str = "",
    profile_threshold: float = TorchProfiler.threshold,
) -> list[Instrument]:
    """The instruments with these names, set up from what a user can say on a command line.

    Args:
        names: some of `INSTRUMENTS`.
        directory: where reports and logs go.
        ncu_path: the ``ncu`` program, or None to look for it.
        metrics: metric names, possibly several to a string with commas; None for all of ours.
        device: ``cuda`` or ``cpu``, for timing and profiling; counters exist on CUDA only.
        timing_steps: warm-up and active steps of unprofiled children.
        ncu_steps: warm-up and active steps of profiled children.
        timeout: seconds a child may take.
        kernels: what to profile kernel by kernel beside that.
        profile_directory: where the PyTorch profiler's folders go, one a case.
        profile_schedule: which steps it records, as in ``wait=1,active=3``.
        profile_threshold: milliseconds from which an operator is a bottleneck.

    Raises:
        DpbenchError: a metric, phase or set does not exist, or ``ncu`` was not found.
    """
    check_timeout(timeout)
    chosen = set(names)
    found: list[Instrument] = []
    # What was said for one that was not chosen must be right as well.
    schedule = Schedule.parse(profile_schedule)
    profiler = TorchProfiler(profile_directory, device, schedule, profile_threshold, timeout)
    asked = [name.strip() for text in metrics or () for name in text.split(",")]
    if asked and not any(asked):
        raise ConfigurationError(f"--ncu-metrics names no metric; try {', '.join(on_chip())}")
    chip = next((gpu.chip for gpu in visible_gpus()), "") if "ncu" in chosen else ""
    resolved = tuple(resolve([*filter(None, asked)] or None, chip))
    if "timing" in chosen:
        found.append(Timing(directory, device, timing_steps, timeout))
    if "ncu" in chosen:
        found.append(Ncu(directory, find_ncu(ncu_path), resolved, ncu_steps, timeout))
    if "ncu_kernels" in chosen or (kernels and kernels.wanted):
        what = kernels or KernelChoice()
        found += what.instruments(directory, find_ncu(ncu_path), timeout)
    if "logical" in chosen:
        from dpbench.instruments.logical.instrument import (
            Logical,  # loads torch, which the others do not
        )

        found.append(Logical(timeout=timeout, directory=directory))
    if "torch_profiler" in chosen:
        found.append(profiler)
    return found


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that ends everything at once.

    Raises:
        ConfigurationError: it is not positive.
    """
    if not seconds > 0:
        raise ConfigurationError(f"the time-out must be positive, not {seconds:g} s")
