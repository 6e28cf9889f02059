"""Errors that dpbench raises on purpose."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

LISTED = 25
"""A message about an unknown name lists all known names if there are at most this many."""


class DpbenchError(Exception):
    """Base class of the errors that dpbench raises on purpose.

    The field ``exit_code`` is the exit status of a command that ends with this error.
    """

    exit_code = 1


class ConfigurationError(DpbenchError):
    """An option, name, file or function of the user cannot be used, or a package is missing."""

    exit_code = 2


class OutOfMemory(DpbenchError):
    """The case needs more memory than is free on the GPU."""


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
