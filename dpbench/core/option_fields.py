"""Declares fields of dataclasses, namely of `Settings` and of instruments, as options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any

from dpbench.core.case import CHOICES, COUNTS, DECLARED
from dpbench.core.case_names import NAMED
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.registry import OUTPUTS


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    **declared: Any,
) -> Any:
    """Declare a dataclass field that is also an option.

    The option's type is the type of the default, unless the default is None, a boolean or a tuple.

    Args:
        help: the option's help text.
        default: the default value.
        pytest: the option's name in pytest; empty if pytest lacks the option. By default
            ``--dpbench-NAME``, or ``--NAME`` if the field's name begins with ``ncu``.
        command: the option's name in commands; empty if commands lack the option. By default
            ``--NAME``.
        declared: other arguments of ``parser.add_argument``.
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
"""Options that write one format, whatever the file's extension is, and the name of the format."""


def axis_help(name: str) -> str:
    """Return the help text of an axis of `Case`."""
    names = NAMED.get(name) or CHOICES.get(name, ())
    help: str = DECLARED[name]["help"]
    return help.format(names=", ".join(names))


def axis(name: str) -> Any:
    """Declare an option that replaces the grid's values along an axis."""
    help = f"{axis_help(name)}; replaces the grid's values, repeatable"
    metavar = "NAME=VALUE" if name == "set" else name.upper()
    return option(help, type=int if name in COUNTS else str, action="append", metavar=metavar)


def file(help: str, **names: Any) -> Any:
    """Declare an option that names a file to write."""
    return option(f"write {help} to this file", type=Path, metavar="FILE", **names)


def of_pytest(help: str, **names: Any) -> Any:
    """Declare an option of pytest without a value, which commands lack."""
    return option(help, False, command="", **names)


def spelled(name: str, described: Mapping[str, Any], *, of_pytest: bool) -> str:
    """Return the name of an option in pytest or in commands, or "" if they lack the option."""
    given: str | None = described["pytest" if of_pytest else "command"]
    if given is not None:
        return given
    prefix = "dpbench-" if of_pytest and not name.startswith("ncu") else ""
    return f"--{prefix}{name.replace('_', '-')}"


def all_spelled(options: Mapping[str, Mapping[str, Any]], *, of_pytest: bool) -> dict[str, str]:
    """Return the names of all options in pytest or in commands, see `spelled`."""
    return {name: spelled(name, each, of_pytest=of_pytest) for name, each in options.items()}


def listed(texts: Iterable[str] | None, option: str, what: str) -> tuple[str, ...]:
    """Return the names in an option's values, which are separated by commas.

    Returns an empty tuple if the option is not set. ``what`` describes a name in the error message.
    """
    every: list[str] = []
    for text in texts or ():
        names = [part.strip() for part in text.split(",") if part.strip()]
        if not names:
            raise ConfigurationError(f"{option} {text!r} names no {what}")
        every += names
    return tuple(every)


def output_of(path: Path) -> str:
    """Return the name in `OUTPUTS` that is the extension of a file, or raise an error."""
    ending = path.suffix.removeprefix(".")
    if ending not in OUTPUTS:
        OUTPUTS.register_installed()
    if ending not in OUTPUTS:
        endings = [f".{name}" for name in OUTPUTS]
        raise unknown("file extension", path.suffix, endings, f"for {path}")
    return ending


# --- options that instruments declare --------------------------------------------------------

_OWN = "own option "
"""Prefix of instruments' options among the attributes of a parsed command line."""


def own_fields(instrument: type) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of each field that `option` declared in a dataclass."""
    own = fields(instrument) if is_dataclass(instrument) else ()
    return {each.name: each.metadata for each in own if "declared" in each.metadata}


def declare_own(
    add: Callable[..., object], instrument: type, *names: str, of_pytest: bool = False
) -> None:
    """Declare the options of an instrument, or only the options in ``names`` if there are any."""
    for name, described in own_fields(instrument).items():
        if not names or name in names:
            option = spelled(name, described, of_pytest=of_pytest)
            add(option, dest=_OWN + name, **described["declared"])


def own_values(options: Namespace) -> dict[str, Any]:
    """Return the values of instruments' options in a parsed command line.

    The keys are names of fields of instruments.
    """
    return {n.removeprefix(_OWN): v for n, v in vars(options).items() if n.startswith(_OWN)}
