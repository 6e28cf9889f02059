"""What is profiled kernel by kernel, and how deeply."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpbench.instruments.base import Instrument
from dpbench.instruments.ncu.kernels import NcuKernels, check_phases
from dpbench.instruments.ncu.speed_of_light import SpeedOfLight, check_sections


@dataclass(frozen=True)
class KernelChoice:
    """Whether and what to profile kernel by kernel.

    Args:
        wanted: whether at all.
        phases: these phases only; every one if there is none.
        set: one of `SETS` of sections, for the kernels that move most; None for no set.
        sections: further sections for them.
        set_kernels: how many kernels these are.

    Raises:
        ConfigurationError: a phase or set does not exist, or no kernel is asked for.
    """

    wanted: bool = False
    phases: tuple[str, ...] = ()
    set: str | None = None
    sections: tuple[str, ...] = ()
    set_kernels: int = SpeedOfLight.kernels

    def __post_init__(self) -> None:
        check_phases(self.phases)
        check_sections(self.set, self.set_kernels)

    def instruments(self, directory: Path, path: str, timeout: float) -> list[Instrument]:
        """The instruments that do it."""
        found: list[Instrument] = [NcuKernels(directory, path, self.phases, timeout=timeout)]
        if self.set or self.sections:
            found.append(
                SpeedOfLight(
                    *(directory, path, self.set, self.sections, self.set_kernels, self.phases),
                    timeout=timeout,
                )
            )
        return found
