"""Checks that files can be written, writes them atomically, and locks them."""

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
"""Control characters of terminals, those that change the direction of writing included; not tab
and line feed."""

STANDARD_OUTPUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""The names of this process's standard output."""


def printable(text: str) -> str:
    """A text from outside with its control characters replaced."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def in_words(error: OSError) -> str:
    """One line about a file that could not be read or written."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def mode_of(path: Path) -> int:
    """The mode of a path that a user named, for `stat.S_ISDIR`; 0 if nothing is there.

    ``path.exists()`` and similar methods raise or hide errors, depending on Python's version.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:  # e.g. below a directory that one may not enter
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def check_is_file(path: Path) -> None:
    """Refuse a path that is not a file."""
    if not stat.S_ISREG(mode := mode_of(path)):
        raise ConfigurationError(f"{path}: {'not a file' if mode else 'no such file'}")


def read_file(path: Path) -> bytes:
    """The content of a file; `OSError` for a pipe or a device, which may never end."""
    if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return path.read_bytes()


def is_standard_output(path: Path) -> bool:
    """Whether a path names this process's standard output."""
    return str(path) in STANDARD_OUTPUT


def is_stream(path: Path) -> bool:
    """Whether a path is written to, not replaced: standard output, a pipe, a device."""
    mode = mode_of(path)
    return is_standard_output(path) or bool(mode and not stat.S_ISREG(mode))


def check_writable_file(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if not path.name or stat.S_ISDIR(mode_of(path)):
        raise ConfigurationError(f"{str(path)!r} is a directory; name a file")
    if not is_stream(path):
        check_writable(Path(os.path.realpath(path)).parent)


def check_writable(directory: Path) -> None:
    """Make a directory, and refuse it if files in it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * 65536)
    except OSError as error:
        raise ConfigurationError(
            f"directory {directory} cannot be written: {error.strerror}"
        ) from error


def check_distinct_files(files: Mapping[str, Path]) -> None:
    """Refuse two options that name the same file; ``files`` has the file of each option."""
    options: dict[Path, str] = {}
    for option, path in files.items():
        first = options.setdefault(Path(os.path.realpath(path)), option)
        if first != option:
            raise ConfigurationError(f"{first} and {option} name the same file, {path.name!r}")


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; an `OSError` has its name, even if the disk is full.

    Streams and the targets of links are written to, not replaced.
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
            with partial.open("xb") as file:  # "x": never write through a link planted there
                file.write(data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)
        raise


class Locked(Exception):
    """Another process holds a lock."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold a lock file; the system releases it if the process dies.

    Yields the file's descriptor, or None on file systems without locks (ENOLCK, EOPNOTSUPP, EIO):
    there nothing is locked. (Some versions of filelock would wait for ever.) Without ``wait``,
    raises `Locked` if another process holds the lock, with the text that it wrote into the file.
    """
    descriptor: int | None = None
    with ExitStack() as ending:
        try:
            # The last holder may have removed the file: if so, open it again.
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
    """A descriptor of a file that every user can open, whatever the umask is.

    `OSError` for a link or a pipe: in a shared folder anybody can put one there.
    """
    flags, descriptor = os.O_RDWR | os.O_NOFOLLOW, None
    while descriptor is None:
        try:
            descriptor = os.open(path, flags)  # Linux may refuse O_CREAT for another's file
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was faster: open that one's
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                with suppress(PermissionError):  # a file system without modes
                    os.fchmod(descriptor, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor
