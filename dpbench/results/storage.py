"""The folder of saved runs: numbered, found again, one of them the reference."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.files import Locked, check_writable, locked, mode_of, write_text
from dpbench.results.outcome import INTERRUPTED
from dpbench.results.run import Heading

LOGICAL = "cpu-logical"
"""The folder of runs that counted without hardware."""

LONGEST = 100
"""Letters of a folder's name; a file system allows 255."""

_FILE = re.compile(r"(\d{4,})_([^\x00-\x1f\x7f-\x9f]+)\.json")


def folder_name(device: str | None) -> str:
    """The folder for a device, e.g. ``NVIDIA-H200``; None stands for no hardware."""
    if not device:
        return LOGICAL
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-.")
    return name[:LONGEST].rstrip("-.") or "gpu"


def check_name(name: str) -> str:
    """A name that can be part of a file's.

    Raises:
        ConfigurationError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigurationError(
            f"run name {name!r} must be made of letters, digits, '.', '_' and '-'"
        )
    return name


def automatic_name(code: dict[str, object] | None, now: datetime) -> str:
    """A name for a run that got none: commit, whether it was changed, and the time in UTC."""
    time = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    if code is None:
        return time
    return f"{str(code['commit'])[:7]}{'-dirty' if code['dirty'] else ''}_{time}"


@dataclass(frozen=True)
class Listing:
    """Runs, newest last; ``skipped`` says for each file that was not read, why not."""

    runs: list[Heading]
    skipped: list[str] = field(default_factory=list)


class Storage:
    """A directory with one folder a device and one numbered file a run, ``0001_NAME.json``.

    Numbers count through all folders, so that one number names one run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def paths(self) -> list[Path]:
        """The files of runs by number, readable or not.

        Raises:
            ConfigurationError: what should be a directory is something else, or it or a folder in
                it cannot be read: then nobody knows whether there are runs.
        """
        found = []
        try:
            for folder in _entries(self.directory):
                with suppress(NotADirectoryError):
                    found += [path for path in _entries(folder) if _FILE.fullmatch(path.name)]
        except NotADirectoryError as error:
            raise ConfigurationError(f"storage {self.directory} is no directory") from error
        except OSError as error:
            raise ConfigurationError(
                f"storage {error.filename} cannot be read: {error.strerror}"
            ) from error
        return sorted(found, key=lambda path: (number_of(path), path.name))

    def listing(self) -> Listing:
        """Every run that can be read, by number, and what was skipped."""
        listing = Listing([])
        for path in self.paths():
            try:
                listing.runs.append(Heading.load(path))
            except ConfigurationError as error:
                listing.skipped.append(f"skipped: {error}")
        return listing

    def find(self, text: str) -> Path:
        """The file of a run named by its number or by a path.

        Raises:
            ConfigurationError: there is none, or a number occurs twice.
        """
        if not text.isdecimal():
            path = Path(text)
            if not stat.S_ISREG(mode_of(path)):
                raise ConfigurationError(f"no run file {text}; dpbench list shows what is saved")
            return path
        found = [path for path in self.paths() if number_of(path) == int(text)]
        if not found:
            numbers = ", ".join(f"{number_of(path):04}" for path in self.paths()[-10:])
            raise ConfigurationError(
                f"no run number {int(text):04} in {self.directory}; there is {numbers or 'none'}"
            )
        if len(found) > 1:
            listed = " and ".join(map(str, found))
            raise ConfigurationError(f"run number {int(text):04} is both {listed}; name the file")
        return found[0]

    def candidates(self, devices: Iterable[str]) -> list[Path]:
        """The runs on these devices, and counted ones, that no session is writing; newest first."""
        folders = {LOGICAL, *map(folder_name, devices)}
        paths = [path for path in reversed(self.paths()) if path.parent.name in folders]
        return [path for path in paths if not is_being_written(path)]

    def interrupted(self, device: str | None) -> tuple[Path | None, list[str]]:
        """A device's latest run that did not come to its end and holds something, if any.

        Also returns why files were skipped on the way.
        """
        skipped: list[str] = []
        for path in reversed(self.paths()):
            if path.parent.name != folder_name(device):
                continue
            try:
                run = Heading.load(path).run
            except ConfigurationError as error:
                skipped.append(f"skipped: {error}")
                continue
            if run.status == INTERRUPTED and run.document.get("cases"):
                return path, skipped
        return None, skipped

    def allocate(self, name: str, device: str | None, text: str) -> Path:
        """Take the next number: a new file with a text in it, that no other session gets."""
        check_name(name)
        folder = self.directory / folder_name(device)
        check_writable(folder)
        with locked(self.directory / ".lock"):
            path = self._next(folder, name)
            try:
                write_text(path, text)
            except OSError:
                path.unlink()  # an empty file would be named as damaged ever after
                raise
        return path

    def _next(self, folder: Path, name: str) -> Path:
        """An empty file with the next number."""
        while True:
            number = max(map(number_of, self.paths()), default=0) + 1
            path = folder / f"{number:04}_{name}.json"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:  # where locks do not work, another session was faster
                continue
            return path

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Hold a run's file while a session writes it; the system lets go if the session dies."""
        lock = _lock(path)
        try:
            with locked(lock, wait=False):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        lock.unlink()
        except Locked as error:
            raise ConfigurationError(f"run file {path} is being written by a session") from error


def is_being_written(path: Path) -> bool:
    """Whether a session holds a run's file now, as far as this user may know."""
    lock = _lock(path)
    if not lock.exists():
        return False
    try:
        with locked(lock, wait=False):
            return False
    except Locked:
        return True


def _lock(path: Path) -> Path:
    """What a session holds that writes a run's file."""
    return path.with_name(f".{path.stem}.lock")


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, whose name an `OSError` says; nothing if there is none."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def number_of(path: Path) -> int:
    """The number of a run's file."""
    return int(path.name.partition("_")[0])
