"""What is profiled kernel by kernel, from what a user says on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.instruments.base import Instrument
from dpbench.instruments.ncu_kernels import NcuKernels, check_phases
from dpbench.instruments.ncu_speed_of_light import SpeedOfLight, check_sections


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

    @classmethod
    def of(cls, options: Any, prefix: str = "") -> KernelChoice:
        """From parsed options; any that asks for kernels means that they are wanted.

        Raises:
            ConfigurationError: a value is none of those that there are.
        """
        phases = _listed(options, f"{prefix}kernels_phase", "phase, such as clip")
        sections = _listed(options, "ncu_section", "section; ncu --list-sections shows them")
        wanted = getattr(options, f"{prefix}kernels") or phases or options.ncu_set or sections
        return cls(bool(wanted), phases, options.ncu_set, sections, options.ncu_set_kernels)

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


def _listed(options: Any, option: str, what: str) -> tuple[str, ...]:
    """The names that an option lists, separated by commas; nothing if it was not given."""
    found: list[str] = []
    for text in getattr(options, option) or ():
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ConfigurationError(f"--{option.replace('_', '-')} {text!r} names no {what}")
        found += names
    return tuple(found)
