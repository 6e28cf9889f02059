"""Instruments, each in a file or folder of its own, behind the interface in `interface`."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError
from dpbench.core.option_fields import declare_own
from dpbench.core.registry import INSTRUMENTS
from dpbench.core.settings import Settings
from dpbench.instruments.interface import Instrument

ON_GPU = ("timing", "ncu")
"""The default instruments on a GPU: times without a profiler, bytes under one."""


def choose(names: Iterable[str], settings: Settings, subject: str = "case") -> list[Instrument]:
    """Build each of the named instruments once, from the settings, to measure a ``subject``.

    Invalid options are refused even if their instrument was not chosen.
    """
    Steps(settings.warmup, settings.active)
    for options in _options():
        settings.of(options)
    asked = {INSTRUMENTS.canonical(name) for name in names}
    if settings.profiles_kernels:
        asked.add("ncu_kernels")
    chosen = [_class(name) for name in INSTRUMENTS if name in asked]
    if wrong := [instrument.name for instrument in chosen if not instrument.measures(subject)]:
        raise ConfigurationError(
            f"{wrong[0]} cannot measure a {subject}: choose an instrument that can, such as "
            f"timing, cupti or logical"
        )
    return [instrument.from_settings(settings) for instrument in chosen]


def _options() -> list[type]:
    """The option classes of dpbench's own instruments. Some instruments share one."""
    return list(dict.fromkeys(kind.options for kind in built_in() if kind.options))


def declare_built_in(add: Callable[..., object], *names: str, of_pytest: bool = False) -> None:
    """Declare the options of dpbench's own instruments: all, or those with these names."""
    for options in _options():
        declare_own(add, options, *names, of_pytest=of_pytest)


def built_in() -> list[type[Instrument]]:
    """Dpbench's own instruments."""
    return [_class(name) for name in INSTRUMENTS if INSTRUMENTS.is_builtin(name)]


def declare_outside(
    group: Callable[[str, str], Callable[..., object]],
    words: Sequence[str],
    option: str = "--instrument",
) -> None:
    """Declare other packages' instruments and their options, for a command's help.

    Args:
        group: makes an option group from a title and a description; returns its ``add``.
        words: the command line. It may name instruments that no entry point announces.
        option: the option that names instruments.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(option, action="append", nargs="?", default=[], dest="names")
    INSTRUMENTS.register_installed()
    for spelling in filter(None, early.parse_known_args(words)[0].names):
        with suppress(ConfigurationError):  # the command itself will report it
            INSTRUMENTS.canonical(spelling)
    for name in INSTRUMENTS:
        if INSTRUMENTS.is_builtin(name):
            continue
        try:
            instrument = _class(name)
        except Exception:  # a broken package must not stop a session that does not use it
            continue
        add = group(f"instrument {name}", (instrument.__doc__ or "").partition("\n")[0])
        try:
            declare_own(add, instrument, of_pytest=option != "--instrument")
        except (ArgumentError, ValueError) as error:
            raise ConfigurationError(f"instrument {name}: {error}; rename its field") from error


def _class(name: str) -> type[Instrument]:
    instrument = INSTRUMENTS[name]
    if not (isinstance(instrument, type) and issubclass(instrument, Instrument)):
        raise ConfigurationError(f"instrument {name!r} is no subclass of dpbench.Instrument")
    return instrument
