"""How it is measured: one file or folder per instrument, behind the interface in ``base``."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError
from dpbench.core.options import declare_own
from dpbench.core.registry import INSTRUMENTS
from dpbench.core.settings import Settings
from dpbench.instruments.interface import Instrument

ON_GPU = ("timing", "ncu")
"""What measures a case on a GPU: times without a profiler, and bytes with it."""


def choose(names: Iterable[str], settings: Settings, subject: str = "case") -> list[Instrument]:
    """The instruments with these names for a subject, as the settings have them, each once.

    What makes no sense is refused, also for instruments that were not chosen.
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
    """The options of dpbench's own instruments, of which some share theirs."""
    return list(dict.fromkeys(kind.options for kind in built_in() if kind.options))


def declare_built_in(add: Callable[..., object], *names: str, of_pytest: bool = False) -> None:
    """Declare the options of dpbench's own instruments, or those with these names."""
    for options in _options():
        declare_own(add, options, *names, of_pytest=of_pytest)


def built_in() -> list[type[Instrument]]:
    """The instruments that came with dpbench."""
    return [_class(name) for name in INSTRUMENTS if INSTRUMENTS.is_builtin(name)]


def declare_outside(
    group: Callable[[str, str], Callable[..., object]],
    words: Sequence[str],
    option: str = "--instrument",
) -> None:
    """Declare instruments that did not come with dpbench, and their options, for a command's help.

    Args:
        group: makes a group of options, of a title and a description; returns what adds to it.
        words: the command line, which may name such instruments; others are installed.
        option: what names them there.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(option, action="append", nargs="?", default=[], dest="names")
    INSTRUMENTS.register_installed()
    for spelling in filter(None, early.parse_known_args(words)[0].names):
        with suppress(ConfigurationError):  # it is refused where it is used
            INSTRUMENTS.canonical(spelling)
    for name in INSTRUMENTS:
        if INSTRUMENTS.is_builtin(name):
            continue
        try:
            instrument = _class(name)
        except Exception:  # of a package that is installed, and maybe not asked for
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
