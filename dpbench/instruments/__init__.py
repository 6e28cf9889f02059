"""Instruments, which measure training steps. This package contains the built-in instruments.

The module `interface` defines what an instrument implements.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import INSTRUMENTS
from dpbench.core.settings import Settings, declare_own
from dpbench.instruments.interface import Instrument

ON_GPU = ("timing", "ncu")
"""Default instruments on a GPU: ``timing`` measures time, ``ncu`` measures bytes."""


def choose(names: Iterable[str], settings: Settings, subject: str = "case") -> list[Instrument]:
    """Build each of the named instruments once, from the session's settings.

    If the settings request separate counts for each kernel, ``ncu_kernels`` is also built.

    Args:
        names: names of instruments; duplicates are ignored.
        settings: the settings of the session. Invalid options of a built-in instrument raise an
            error, even if the instrument is not among ``names``.
        subject: kind of subject that the instruments must be able to measure: ``case``,
            ``script`` or ``step``.
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
            f"the instrument {wrong[0]} cannot measure a {subject}: choose timing, cupti or logical"
        )
    return [instrument.from_settings(settings) for instrument in chosen]


def _options() -> list[type]:
    """Return the option classes of the built-in instruments, without duplicates."""
    return list(dict.fromkeys(kind.options for kind in built_in() if kind.options))


def declare_built_in(add: Callable[..., object], *names: str, of_pytest: bool = False) -> None:
    """Declare the options of the built-in instruments.

    Args:
        add: function that adds one option to a parser.
        names: names of the options to declare. If empty, all options are declared.
        of_pytest: True to declare options of pytest, False to declare options of a command.
    """
    for options in _options():
        declare_own(add, options, *names, of_pytest=of_pytest)


def built_in() -> list[type[Instrument]]:
    """Return the classes of the built-in instruments."""
    return [_class(name) for name in INSTRUMENTS if INSTRUMENTS.is_builtin(name)]


def declare_outside(
    group: Callable[[str, str], Callable[..., object]],
    words: Sequence[str],
    option: str = "--instrument",
) -> None:
    """Declare the options of instruments that other packages define.

    Args:
        group: creates an option group with a title and a description, and returns the function
            that adds an option to the group.
        words: the command line. An instrument that the command line names as ``module:Class``
            needs no entry point.
        option: the command-line option whose values are names of instruments.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(option, action="append", nargs="?", default=[], dest="names")
    INSTRUMENTS.register_installed()
    for spelling in filter(None, early.parse_known_args(words)[0].names):
        with suppress(ConfigurationError):  # the command reports the error later
            INSTRUMENTS.canonical(spelling)
    for name in INSTRUMENTS:
        if INSTRUMENTS.is_builtin(name):
            continue
        try:
            instrument = _class(name)
        except Exception:  # a broken package must not stop sessions that do not use it
            continue
        add = group(f"instrument {name}", (instrument.__doc__ or "").partition("\n")[0])
        try:
            declare_own(add, instrument, of_pytest=option != "--instrument")
        except (ArgumentError, ValueError) as error:
            raise ConfigurationError(
                f"an option of the instrument {name} cannot be declared ({error}): rename the "
                f"field in its class"
            ) from error


def _class(name: str) -> type[Instrument]:
    instrument = INSTRUMENTS[name]
    if not (isinstance(instrument, type) and issubclass(instrument, Instrument)):
        raise ConfigurationError(
            f"the instrument {name!r} is not a subclass of dpbench.Instrument: pass the name of "
            f"a subclass"
        )
    return instrument
