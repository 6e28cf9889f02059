"""What a session was asked for, as far as its instruments go.

From this each instrument builds itself (`Instrument.from_settings`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpbench.case import ALL_PHASES
from dpbench.errors import ConfigurationError, unknown
from dpbench.instruments.ncu.metrics import on_chip, resolve
from dpbench.process.schedule import Schedule, Steps

SETS = ("basic", "detailed", "full")
"""Sets of ncu's sections; ``detailed`` takes 20 passes a kernel on GH100, ``full`` 38."""


def check_phases(phases: Iterable[str]) -> None:
    """Refuse what is no phase."""
    for phase in phases:
        if phase not in ALL_PHASES:
            raise unknown("phase", phase, ALL_PHASES)


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that ends everything at once."""
    if not seconds > 0:
        raise ConfigurationError(f"the time-out must be positive, not {seconds:g} s")


@dataclass(frozen=True)
class KernelChoice:
    """Whether and what to profile kernel by kernel.

    Args:
        wanted: whether at all.
        phases: these phases only; every one if there is none.
        set: one of `SETS`, for the kernels that move most; None for no set.
        sections: further sections for them.
        set_kernels: how many kernels these are.
    """

    wanted: bool = False
    phases: tuple[str, ...] = ()
    set: str | None = None
    sections: tuple[str, ...] = ()
    set_kernels: int = 5

    def __post_init__(self) -> None:
        check_phases(self.phases)
        if self.set is not None and self.set not in SETS:
            raise unknown("set of sections", self.set, SETS)
        if self.set_kernels < 1:
            raise ConfigurationError(f"sections need at least one kernel, not {self.set_kernels}")

    @property
    def instruments(self) -> tuple[str, ...]:
        """The names of the instruments that do it."""
        sections = ("speed_of_light",) if self.set or self.sections else ()
        return ("ncu_kernels", *sections) if self.wanted or sections else ()


@dataclass(frozen=True)
class InstrumentSettings:
    """What a user can say of how to measure; checked also for instruments that are not used.

    Args:
        directory: where reports and logs go.
        ncu_path: the ``ncu`` program, or None to look for it.
        metrics: metric names, possibly several to a string with commas; empty for all of ours.
        device: ``cuda`` or ``cpu``, for timing and profiling; counters exist on CUDA only.
        timing_steps: warm-up and active steps of unprofiled children.
        ncu_steps: warm-up and active steps of profiled children.
        timeout: seconds a child may take.
        kernels: what to profile kernel by kernel.
        profile_directory: where the PyTorch profiler's folders go, one a case.
        profile_schedule: which steps it records.
        profile_threshold: milliseconds from which an operator is a bottleneck.
    """

    directory: Path
    ncu_path: str | None = None
    metrics: tuple[str, ...] = ()
    device: str = "cuda"
    timing_steps: Steps = Steps(warmup=3, active=5)
    ncu_steps: Steps = Steps(warmup=1, active=1)
    timeout: float = 1800.0
    kernels: KernelChoice = KernelChoice()
    profile_directory: Path = Path("runs")
    profile_schedule: Schedule = Schedule()
    profile_threshold: float = 10.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if not self.profile_threshold >= 0:
            raise ConfigurationError(
                f"the threshold must be >= 0 ms, not {self.profile_threshold:g}"
            )
        resolve(self.metric_names)

    @property
    def metric_names(self) -> list[str] | None:
        """The names in ``metrics`` one by one; None for all that a chip has."""
        names = [name.strip() for text in self.metrics for name in text.split(",")]
        if names and not any(names):
            known = ", ".join(on_chip())
            raise ConfigurationError(f"--ncu-metrics names no metric; try {known}")
        return list(filter(None, names)) or None
