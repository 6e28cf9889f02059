"""How a field of `Settings` says which option it is."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from dpbench.case import CHOICES, COUNTS, DECLARED
from dpbench.registry import NAMED


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    **declared: Any,
) -> Any:
    """A field that is an option.

    Commands call it ``--NAME``, pytest ``--dpbench-NAME`` unless the name begins with ncu, or as
    is given here; who has it not gives the empty name. It takes what its default is.
    """
    if default is not None and not isinstance(default, bool | tuple):
        help += " (default %(default)s)"
        declared["type"] = type(default)
    if default is False:
        declared["action"] = "store_true"
    declared |= {"help": help, "default": [] if default == () else default}
    metadata = {"pytest": pytest, "command": command, "declared": declared}
    return field(default=default, metadata=metadata)


def axis_help(name: str) -> str:
    """What the option of an axis of `Case` says of it."""
    names = NAMED.get(name) or CHOICES.get(name, ())
    help: str = DECLARED[name]["help"]
    return help.format(names=", ".join(names))


def axis(name: str) -> Any:
    """An option that replaces the values along an axis of the grid."""
    help = f"replaces the grid's, repeatable: {axis_help(name)}"
    metavar = "NAME=VALUE" if name == "set" else name.upper()
    return option(help, type=int if name in COUNTS else str, action="append", metavar=metavar)


def file(help: str, **names: Any) -> Any:
    """An option that names a file to write."""
    return option(f"write {help} here", type=Path, metavar="FILE", **names)


def of_pytest(help: str, **names: Any) -> Any:
    """A switch of pytest alone."""
    return option(help, False, command="", **names)
