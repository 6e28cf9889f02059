"""The errors that dpbench raises on purpose; each message names what would work."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

LISTED = 25
"""Messages list at most so many names, those most similar to the one that was given."""


class DpbenchError(Exception):
    """Base of every error that dpbench raises on purpose.

    ``exit_code`` is what a command ends with when the error reaches its top level.
    """

    exit_code = 1


class ConfigurationError(DpbenchError):
    """Something that was asked for does not exist, or options contradict each other."""

    exit_code = 2


class OutOfMemory(DpbenchError):
    """A case does not fit the GPU."""


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The error for a name that is not in a list; it has the nearest one."""
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
    """The innermost line of an error's traceback that is in the user's own code, in brackets."""
    others = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[1]), "<")
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        if not file.startswith(others) and "-packages" not in file:
            return f" ({Path(file).name}:{line}: {linecache.getline(file, line).strip()})"
    return ""
