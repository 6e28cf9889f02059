"""Errors that dpbench raises on purpose."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

LISTED = 25
"""A message about an unknown name lists all known names if there are at most this many."""

T = TypeVar("T")


class DpbenchError(Exception):
    """Base class of the errors that dpbench raises on purpose.

    The field ``exit_code`` is the exit status of a command that ends with this error.
    """

    exit_code = 1


class ConfigurationError(DpbenchError):
    """An option, name, file or function of the user cannot be used, or a package is missing."""

    exit_code = 2


class InstrumentError(DpbenchError):
    """A failed measurement. Its class name and message are in the outcome of the measurement.

    Attributes:
        remedy: what the user can do about the failure; empty if unknown.
        log: the case's log file; None if the case has no log.
    """

    remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        # A message from another process ends with the remedy.
        super().__init__(message.removesuffix(f"; {self.remedy}"))  # what pickle passes again
        self.log = log

    def __str__(self) -> str:
        return f"{self.args[0]}{self.remedy and f'; {self.remedy}'}"


class CaseOutOfMemory(InstrumentError):
    """A case that needs more memory than the GPU has."""

    remedy = "use a smaller batch size, sequence length or model size"


class CaseTimedOut(InstrumentError):
    """A case that ran longer than its time-out. All its processes were ended."""

    remedy = "raise the time-out, or read in the log where the case hung"


class GpuBusy(InstrumentError):
    """A case whose GPU was locked by another process for longer than the case's time-out."""

    remedy = "end that process, or raise the time-out"


class CaseFailed(InstrumentError):
    """A case or script that failed in the measured process. The log, if any, gives details."""


class ScriptInterrupted(CaseFailed):
    """A script that the user interrupted with Ctrl-C."""


class CaseRefused(InstrumentError, ConfigurationError):
    """A case that was refused, for example because of an unknown name or incompatible options."""


def as_instrument_error(error: Exception) -> InstrumentError:
    """Return the `InstrumentError` by which a measured process reports an error to its parent."""
    if isinstance(error, InstrumentError):
        return error
    if isinstance(error, DpbenchError):
        kind = CaseRefused if isinstance(error, ConfigurationError) else CaseFailed
        return kind(str(error))
    first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
    return CaseFailed(f"{type(error).__name__}: {first_line}{own_line(error.__traceback__)}")


def error_named(name: str) -> type[InstrumentError]:
    """Return the class of `InstrumentError` with a name, or `CaseFailed` if none is known."""
    return next((k for k in subclasses(InstrumentError) if k.__name__ == name), CaseFailed)


def subclasses(base: type[T]) -> list[type[T]]:
    """Return a class, its direct subclasses, their subclasses, and so on."""
    kinds = [base]
    for kind in kinds:  # the list grows meanwhile
        kinds += type.__subclasses__(kind)
    return kinds


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """Return an error that lists known names, and suggests a similar name if there is one.

    Args:
        kind: the kind of name, such as ``trainer``.
        name: the unknown name.
        known: the known names. With more than `LISTED` names, the message lists only some of them.
        hint: a text that the message shows in brackets after the list.
    """
    names = [*known]
    spelled = {each.casefold(): each for each in names}
    asked = str(name).casefold()
    first = asked.partition("_")[0]
    nearest = get_close_matches(asked, spelled, n=9)
    nearest = sorted(nearest, key=lambda each: each.partition("_")[0] != first)[:5]
    if len(names) > LISTED:
        longer = sorted((known for known in names if str(name) in known), key=len)
        names = [*(longer[:5] or [spelled[each] for each in nearest] or names[:LISTED]), "…"]
    meant = f"; did you mean {spelled[nearest[0]]}?" if nearest else ""
    listed = ", ".join(names) + (hint and f" ({hint})")
    return ConfigurationError(f"unknown {kind} {str(name)!r}; choose from {listed}{meant}")


def own_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, as text in brackets.

    Returns "" if the traceback has no line of the user's code.
    """
    others = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[1]), "<")
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        if not file.startswith(others) and "-packages" not in file:
            return f" ({Path(file).name}:{line}: {linecache.getline(file, line).strip()})"
    return ""
