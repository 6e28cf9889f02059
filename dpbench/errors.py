"""The errors that dpbench raises on purpose; each message names what would work."""

from __future__ import annotations

from collections.abc import Iterable


class DpbenchError(Exception):
    """Base of every error that dpbench raises on purpose.

    ``exit_code`` is what a command ends with when the error reaches its top level.
    """

    exit_code = 1


class ConfigurationError(DpbenchError):
    """Something asked for does not exist or does not fit together."""

    exit_code = 2


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The error for a name that is not in a list of names, with the list."""
    return ConfigurationError(
        f"unknown {kind} {str(name)!r}; choose from {', '.join(known)}{hint and f' ({hint})'}"
    )
