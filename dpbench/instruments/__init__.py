"""How it is measured: one file or folder per instrument, behind the interface in ``base``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points

from dpbench.errors import ConfigurationError
from dpbench.instruments.base import Instrument
from dpbench.instruments.settings import InstrumentSettings
from dpbench.registry import Registry

INSTRUMENTS = Registry(
    "instrument",
    {
        "timing": "dpbench.instruments.timing:Timing",
        "ncu": "dpbench.instruments.ncu.ranges:Ncu",
        "ncu_kernels": "dpbench.instruments.ncu.kernels:NcuKernels",
        "speed_of_light": "dpbench.instruments.ncu.speed_of_light:SpeedOfLight",
        "logical": "dpbench.instruments.logical.instrument:Logical",
        "torch_profiler": "dpbench.instruments.torch_profiler.instrument:TorchProfiler",
    },
)
"""Instruments by name, in the order in which they measure. Others are named by import target, or
by an entry point of the group `ENTRY_POINTS`."""

ENTRY_POINTS = "dpbench.instruments"

ON_GPU = ("timing", "ncu")
"""What measures a case on a GPU: times without a profiler, and bytes with it."""


def choose(names: Iterable[str], settings: InstrumentSettings) -> list[Instrument]:
    """The instruments with these names, as the settings have them, each once."""
    asked = [_canonical(name) for name in (*names, *settings.kernels.instruments)]
    chosen = {name: INSTRUMENTS[name] for name in INSTRUMENTS if name in asked}
    for name, instrument in chosen.items():
        if not (isinstance(instrument, type) and issubclass(instrument, Instrument)):
            raise ConfigurationError(f"instrument {name!r} is no subclass of dpbench.Instrument")
    return [instrument.from_settings(settings) for instrument in chosen.values()]


def _canonical(spelling: str) -> str:
    """The short name for any spelling of an instrument's."""
    try:
        return INSTRUMENTS.canonical(spelling)
    except ConfigurationError:  # nothing of dpbench's own: look what else is installed
        for entry in entry_points(group=ENTRY_POINTS):
            if entry.name not in INSTRUMENTS:
                INSTRUMENTS.register(entry.name, entry.value)
        return INSTRUMENTS.canonical(spelling)
