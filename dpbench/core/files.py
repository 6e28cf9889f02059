"""Functions that check, read, write and lock files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dpbench.core.errors import ConfigurationError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, including characters that change the direction of writing. Tab and line feed
are not included."""

STANDARD_OUTPUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Paths of this process's standard output."""


def printable(text: str) -> str:
    """Replace the control characters in a text."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def in_words(error: OSError) -> str:
    """Return one line that names the reason of an error, and the file if it is known."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def mode_of(path: Path) -> int:
    """Return the mode of a path, for `stat.S_ISDIR` and the like, or 0 if the path does not exist.

    ``path.exists()`` and similar methods raise or hide errors, depending on Python's version.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:  # e.g. no permission to enter the directory
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def check_is_file(path: Path) -> None:
    """Raise `ConfigurationError` if a path is not a regular file."""
    if not stat.S_ISREG(mode := mode_of(path)):
        raise ConfigurationError(f"{path}: {'not a file' if mode else 'no such file'}")


def read_file(path: Path) -> bytes:
    """Return the content of a file; raise `OSError` for a pipe or a device, which may never end."""
    if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return path.read_bytes()


def is_standard_output(path: Path) -> bool:
    """Return True if a path names this process's standard output."""
    return str(path) in STANDARD_OUTPUT


def is_stream(path: Path) -> bool:
    """Return True for standard output, and for an existing path that is not a regular file.

    Pipes and devices, for example, must be written in place.
    """
    mode = mode_of(path)
    return is_standard_output(path) or bool(mode and not stat.S_ISREG(mode))


def check_writable_file(path: Path) -> None:
    """Raise `ConfigurationError` if a file cannot be written; create its directory.

    Does not check whether standard output, a pipe or a device can be written.
    """
    if not path.name or stat.S_ISDIR(mode_of(path)):
        raise ConfigurationError(f"{str(path)!r} is a directory; name a file")
    if not is_stream(path):
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
    """Write a text as UTF-8 with `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a regular file completely or not at all.

    Streams are written in place, and links stay links. An `OSError` always has the file's name,
    even if the disk is full.
    """
    try:
        if is_stream(path):
            with os.fdopen(os.dup(1), "wb") if is_standard_output(path) else path.open("wb") as out:
                out.write(data)
            return
        target = Path(os.path.realpath(path))
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
    """Another process holds the lock; the message is the text of the lock file."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold a lock on a file; the system releases the lock if the process dies.

    Yields the file's descriptor. If the file cannot be opened or locked, yields None and locks
    nothing. For example, some file systems have no locks (ENOLCK, EOPNOTSUPP, EIO). The filelock
    package is not used, because some versions wait for ever on such file systems. Without ``wait``,
    raises `Locked` if another process holds the lock.
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
    """Open a lock file. A new file has permissions for every user, whatever the umask is.

    Raises `OSError` for a link or a pipe, which any user can make in a shared folder.
    """
    flags, descriptor = os.O_RDWR | os.O_NOFOLLOW, None
    while descriptor is None:
        try:
            descriptor = os.open(
                path, flags
            )  # without O_CREAT, which Linux may refuse for another user's file
        except FileNotFoundError:
            with suppress(FileExistsError):  # if another process has just made the file, open it
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                with suppress(PermissionError):  # if the file system has no modes
                    os.fchmod(descriptor, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor
