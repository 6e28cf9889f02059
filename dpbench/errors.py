"""The errors that dpbench raises on purpose; each message names what would work."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path


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


def mode_of(path: Path) -> int:
    """The mode of what a user named, for `stat.S_ISDIR` and its like; 0 if nothing is there.

    Instead of ``path.exists()`` and its like, which raise some errors, or hide all, as the version
    of Python has it.

    Raises:
        ConfigurationError: one cannot know, e.g. below a directory that one may not enter.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def check_is_file(path: Path) -> None:
    """Find out whether a file that was named is there.

    Raises:
        ConfigurationError: it is not, it is a directory, or it lies where one may not look.
    """
    mode = mode_of(path)
    if stat.S_ISDIR(mode):
        raise ConfigurationError(f"{path} is a directory; name a file")
    if not mode:
        raise ConfigurationError(f"{path}: no such file")


def check_writable_file(path: Path) -> None:
    """Find out before a GPU minute is spent whether a file can be written.

    Raises:
        ConfigurationError: it cannot.
    """
    if not path.name or stat.S_ISDIR(mode_of(path)):
        raise ConfigurationError(f"{str(path)!r} is a directory; name a file")
    check_writable(path.parent)


def check_writable(directory: Path) -> None:
    """Make a directory, and find out before a GPU minute is spent whether it can be written.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * 65536)
    except OSError as error:
        raise ConfigurationError(
            f"directory {directory} cannot be written: {error.strerror}"
        ) from error


def check_distinct_files(files: Mapping[str, Path | None]) -> None:
    """Refuse one file for two kinds of output, of which the last would replace the others.

    Args:
        files: what each option names, if it was given.

    Raises:
        ConfigurationError: two options name the same file.
    """
    options: dict[Path, str] = {}
    for option, path in files.items():
        first = options.setdefault(path.resolve(), option) if path else option
        if path and first != option:
            raise ConfigurationError(f"{first} and {option} name the same file, {path.name!r}")
