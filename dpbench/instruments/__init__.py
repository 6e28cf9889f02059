"""How it is measured: one file or folder per instrument, behind the interface in ``base``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points

from dpbench.errors import ConfigurationError
from dpbench.instruments.base import Instrument
from dpbench.instruments.ncu.metrics import resolve
from dpbench.metrics import METRICS
from dpbench.process.messages import Schedule, Steps
from dpbench.registry import INSTRUMENTS
from dpbench.settings import Settings

ON_GPU = ("timing", "ncu")
"""What measures a case on a GPU: times without a profiler, and bytes with it."""


def choose(names: Iterable[str], settings: Settings) -> list[Instrument]:
    """The instruments with these names, as the settings have them, each once.

    What makes no sense is refused, also for instruments that were not chosen.
    """
    resolve(settings.metric_names, ours={m.name: m for m in METRICS.counted("ncu")})
    Schedule.parse(settings.profile_schedule)
    Steps(settings.warmup, settings.active)
    Steps(settings.ncu_warmup, settings.ncu_active)
    asked = {_canonical(name) for name in names}
    if settings.profiles_kernels:
        asked.add("ncu_kernels")
    return [_class(name).from_settings(settings) for name in INSTRUMENTS if name in asked]


def _canonical(spelling: str) -> str:
    try:
        return INSTRUMENTS.canonical(spelling)
    except ConfigurationError:  # nothing of dpbench's own: look what else is installed
        for entry in entry_points(group="dpbench.instruments"):
            if entry.name not in INSTRUMENTS:
                INSTRUMENTS.register(entry.name, entry.value)
        return INSTRUMENTS.canonical(spelling)


def _class(name: str) -> type[Instrument]:
    instrument = INSTRUMENTS[name]
    if not (isinstance(instrument, type) and issubclass(instrument, Instrument)):
        raise ConfigurationError(f"instrument {name!r} is no subclass of dpbench.Instrument")
    return instrument
