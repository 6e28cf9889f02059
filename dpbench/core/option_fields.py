"""Declares fields of `Settings` and of instruments as options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any

from dpbench.core.case import CHOICES, COUNTS, DECLARED
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.registry import NAMED, OUTPUTS


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    **declared: Any,
) -> Any:
    """A field that is an option.

    Commands call it ``--NAME``, pytest ``--dpbench-NAME`` (``--NAME`` if that begins with ncu), or
    as given here; an empty name leaves it out there. Its type is that of its default.
    """
    if default is not None and not isinstance(default, bool | tuple):
        help += " (default %(default)s)"
        declared["type"] = type(default)
    if default is False:
        declared["action"] = "store_true"
    declared |= {"help": help, "default": [] if default == () else default}
    metadata = {"pytest": pytest, "command": command, "declared": declared}
    return field(default=default, metadata=metadata)


SHORT_FORMS = {"json": "json", "markdown": "md", "csv": "csv", "html": "html"}
"""The options that imply an output whatever the file's name, and that output."""


def axis_help(name: str) -> str:
    """The help of an axis of `Case`."""
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
    """A switch that only pytest has."""
    return option(help, False, command="", **names)


def spelled(name: str, described: Mapping[str, Any], *, of_pytest: bool) -> str:
    """The name of an option in pytest or the commands; empty if they lack it."""
    given: str | None = described["pytest" if of_pytest else "command"]
    if given is not None:
        return given
    prefix = "dpbench-" if of_pytest and not name.startswith("ncu") else ""
    return f"--{prefix}{name.replace('_', '-')}"


def below(directory: Path, value: Any) -> Any:
    """A value with relative paths resolved below a directory, and lists as tuples."""
    if isinstance(value, list):
        return tuple(below(directory, each) for each in value)
    return directory / value if isinstance(value, Path) else value


def listed(texts: Iterable[str] | None, option: str, what: str) -> tuple[str, ...]:
    """The names that an option lists, separated by commas; nothing if it was not given."""
    every: list[str] = []
    for text in texts or ():
        names = [part.strip() for part in text.split(",") if part.strip()]
        if not names:
            raise ConfigurationError(f"{option} {text!r} names no {what}")
        every += names
    return tuple(every)


def output_of(path: Path) -> str:
    """The output for a file name's extension."""
    ending = path.suffix.removeprefix(".")
    if ending not in OUTPUTS:
        OUTPUTS.register_installed()
    if ending not in OUTPUTS:
        endings = [f".{name}" for name in OUTPUTS]
        raise unknown("ending", path.suffix, endings, f"of {path}; each is an output")
    return ending


# --- options that instruments declare --------------------------------------------------------

_OWN = "own option "
"""The prefix of instrument options among all parsed options."""


def own_fields(instrument: type) -> dict[str, Mapping[str, Any]]:
    """The option fields of an instrument, or of its `options`, as declared."""
    own = fields(instrument) if is_dataclass(instrument) else ()
    return {each.name: each.metadata for each in own if "declared" in each.metadata}


def declare_own(
    add: Callable[..., object], instrument: type, *names: str, of_pytest: bool = False
) -> None:
    """Declare the options of an instrument, or those with these names, see `own_fields`."""
    for name, described in own_fields(instrument).items():
        if not names or name in names:
            option = spelled(name, described, of_pytest=of_pytest)
            add(option, dest=_OWN + name, **described["declared"])


def own_values(options: Namespace) -> dict[str, Any]:
    """The values of such options in a command line, by field."""
    return {n.removeprefix(_OWN): v for n, v in vars(options).items() if n.startswith(_OWN)}
