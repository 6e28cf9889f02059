"""Functions that check, read, write and lock files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dpbench.core.errors import ConfigurationError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Matches control characters (except tab and line feed), line separators, and characters that
change the direction of writing."""


def printable(text: str) -> str:
    """Replace each control character in a text with the character U+FFFD."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def in_words(error: OSError) -> str:
    """Return the reason of an error, after the name of the file if the error has one."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def is_file(path: Path) -> bool:
    """Return True for a regular file; raise `ConfigurationError` if one cannot look at a path."""
    try:
        return path.is_file()
    except OSError as error:  # e.g. no permission to enter the directory
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def check_is_file(path: Path) -> None:
    """Raise `ConfigurationError` if a path is not a regular file."""
    if not is_file(path):
        raise ConfigurationError(f"{path}: {'not a file' if path.exists() else 'no such file'}")


def check_writable_file(path: Path) -> None:
    """Create the directory of a file; raise `ConfigurationError` if the file cannot be written."""
    if not path.name or (not is_file(path) and path.exists()):
        what = "a directory" if path.is_dir() else "a pipe or a device"
        raise ConfigurationError(f"{str(path)!r} is {what}; name a file")
    check_writable(Path(os.path.realpath(path)).parent)


def check_writable(directory: Path) -> None:
    """Create a directory; raise `ConfigurationError` if files in it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * 65536)
    except OSError as error:
        raise ConfigurationError(
            f"directory {directory} cannot be written: {error.strerror}"
        ) from error


def check_distinct_files(files: Mapping[str, Path]) -> None:
    """Raise `ConfigurationError` if two options name the same file.

    Args:
        files: maps each option to its file.
    """
    options: dict[Path, str] = {}
    for option, path in files.items():
        first = options.setdefault(Path(os.path.realpath(path)), option)
        if first != option:
            raise ConfigurationError(f"{first} and {option} name the same file, {path.name!r}")


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a regular file completely or not at all.

    If the path is a link, the target of the link is written. A device is refused, because a file
    would replace it. If an `OSError` is raised, its ``filename`` is ``path``.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            with partial.open("xb") as file:  # "x": do not follow a link that somebody else made
                file.write(data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)
        raise


class Locked(Exception):
    """Raised if another process holds a lock. The message is the content of the lock file."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold a lock on a file; the system releases the lock if the process dies.

    Yields the file's descriptor. If the file cannot be opened or locked, yields None and locks
    nothing. For example, some file systems have no locks (ENOLCK, EOPNOTSUPP, EIO). The filelock
    package is not used, because some of its versions wait for ever on file systems without locks.
    If ``wait`` is False and another process holds the lock, raises `Locked`.
    """
    descriptor: int | None = None
    with ExitStack() as ending:
        try:
            # If the last holder has removed the file, open a new file.
            while descriptor is None or not os.fstat(descriptor).st_nlink:
                descriptor = _open(path)
                ending.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError as error:
                    raise Locked(os.pread(descriptor, 1000, 0).decode(errors="replace")) from error
        except OSError:
            descriptor = None
        yield descriptor


def _open(path: Path) -> int:
    """Open a lock file, or create it with permissions for every user.

    Raises `OSError` for a link, which another user may have put into a shared folder.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW
    while True:
        with suppress(FileNotFoundError):
            # Without O_CREAT, which Linux may refuse for another user's file.
            return os.open(path, flags)
        with suppress(FileExistsError):  # another process has just made the file
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            with suppress(PermissionError):  # the file system has no modes
                os.fchmod(descriptor, 0o666)
            return descriptor
