"""The directory of saved runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, check_writable, in_words, is_file, locked
from dpbench.results.outcome import INTERRUPTED
from dpbench.results.run import Run

LOGICAL = "cpu-logical"
"""The name of the folder of runs that were counted without hardware."""

_FILE = re.compile(r"(\d{4,})_([^\x00-\x1f\x7f-\x9f]+)\.json")


def folder_name(device: str | None) -> str:
    """Return the name of the folder for runs on a device, e.g. ``NVIDIA-H200``.

    Without a device, return the name of the folder for runs that were counted without hardware.
    """
    if not device:
        return LOGICAL
    return re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-.") or "gpu"


class Storage:
    """A directory of saved runs.

    The directory has a folder for each device. The folder has a file, such as ``0001_NAME.json``,
    for each run. A new run gets a number that no run in any folder has. Two files can have the
    same number if a file was copied or if the file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def paths(self) -> list[Path]:
        """Return the files of all runs, sorted by number, including files that cannot be read.

        Raises:
            ConfigurationError: the directory exists but cannot be listed.
        """
        paths: list[Path] = []
        try:
            for folder in self.directory.iterdir():
                if folder.is_dir():
                    paths += (path for path in folder.iterdir() if _FILE.fullmatch(path.name))
        except FileNotFoundError:
            pass  # no run has been saved
        except OSError as error:
            raise ConfigurationError(f"storage cannot be read: {in_words(error)}") from error
        return sorted(paths, key=lambda path: (_number(path), path.name))

    def listing(self) -> tuple[list[Run], list[str]]:
        """Return all readable runs, sorted by number, and a message for each skipped file."""
        skipped: list[str] = []
        return list(readable(self.paths(), Run.load, skipped)), skipped

    def find(self, text: str) -> Path:
        """Return the file of the run with this number, path or name.

        If several runs have the name, the run with the largest number is returned.
        """
        if not re.fullmatch(r"\d{1,18}", text):
            if is_file(Path(text)):
                return Path(text)
            return self._named(text)
        paths, number = self.paths(), f"run number {int(text):04}"
        matching = [path for path in paths if _number(path) == int(text)]
        if not matching:
            numbers = ", ".join(f"{_number(path):04}" for path in paths[-10:])
            saved = f"its latest runs are {numbers}" if numbers else "it has no runs"
            raise ConfigurationError(f"no {number} in {self.directory}; {saved}")
        if len(matching) > 1:
            listed = " and ".join(map(str, matching))
            raise ConfigurationError(f"{number} is both {listed}; name the file")
        return matching[0]

    def _named(self, name: str) -> Path:
        saved = {_name(path): path for path in self.paths()}
        if name in saved:
            return saved[name]
        nearest = "".join(f"; did you mean {each}?" for each in get_close_matches(name, saved, 1))
        where = f"no run file {name}, and no run of that name in {self.directory}"
        raise ConfigurationError(f"{where}; dpbench list shows what is saved{nearest}")

    def candidates(self, devices: Iterable[str]) -> list[Path]:
        """Return the files of runs on these devices or without hardware, the newest first."""
        folders = {LOGICAL, *map(folder_name, devices)}
        return [path for path in reversed(self.paths()) if path.parent.name in folders]

    def interrupted(
        self, device: str | None, shard: str | None, name: str | None, skipped: list[str]
    ) -> Path | None:
        """Find the latest interrupted run that has a case and fits the arguments.

        Args:
            device: the device of the run, or None for runs that were counted without hardware.
            shard: the shard of the run, or None for runs of a whole grid.
            name: the name of the run, or None for any name.
            skipped: the list to which messages on unreadable files are added.

        Returns:
            The path of the run's file, or None.
        """
        paths = [
            path
            for path in reversed(self.paths())
            if path.parent.name == folder_name(device) and name in (None, _name(path))
        ]
        for run in readable(paths, Run.load, skipped):
            same_shard = run.session.get("grid", {}).get("shard") == shard
            if same_shard and run.status == INTERRUPTED and run.document.get("cases"):
                return run.path
        return None

    def allocate(self, name: str, device: str | None, text: str) -> Path:
        """Create the file of a run from its text. The name begins with the next free number.

        A lock prevents two sessions from getting the same number, if the file system has locks.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ConfigurationError(
                f"run name {name!r} must be made of letters, digits, '.', '_' and '-'"
            )
        folder = self.directory / folder_name(device)
        check_writable(folder)
        with locked(self.directory / ".lock"):
            while True:
                number = max(map(_number, self.paths()), default=0) + 1
                path = folder / f"{number:04}_{name}.json"
                try:
                    with path.open("x", encoding="utf-8") as file:
                        file.write(text)
                    return path
                except FileExistsError:
                    continue  # another session took the number, on a file system without locks
                except OSError as error:
                    path.unlink(missing_ok=True)  # an incomplete file would be reported as damaged
                    raise ConfigurationError(f"{path}: {error.strerror}") from error

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Lock a run's file while a session writes it. The lock ends with the process."""
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
    """Return True if a session holds the lock of a run's file, as far as this user can see it."""
    try:
        with locked(_lock(path), wait=False) if _lock(path).exists() else nullcontext():
            return False
    except Locked:
        return True


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.stem}.lock")


def _number(path: Path) -> int:
    return int(path.name.partition("_")[0])


def _name(path: Path) -> str:
    return path.stem.partition("_")[2]


def readable(
    paths: Iterable[Path], load: Callable[[Path], Run], skipped: list[str]
) -> Iterator[Run]:
    """Yield the runs that can be read, and add a message on each unreadable file to ``skipped``."""
    for path in paths:
        try:
            yield load(path)
        except ConfigurationError as error:
            skipped.append(f"skipped: {error}")


# --- the reference run -----------------------------------------------------------------------


def check_comparable(
    before: Run, after: Collection[tuple[str, str]], name: str, *, across: bool, option: str
) -> None:
    """Raise an error if two runs have no common instrument.

    Unless ``across`` is true, also raise an error if an instrument occurs in both runs, but on no
    common device.

    Args:
        before: the reference run.
        after: the pairs (device, instrument) of the run to compare with it.
        name: the name of the run to compare, for the message.
        across: whether the devices may differ.
        option: the option that sets ``across``, for the message.

    Raises:
        ConfigurationError: the runs cannot be compared.
    """
    old, new = set(before.sources), set(after)
    shared = {by for _, by in old} & {by for _, by in new}
    if shared and (across or {by for _, by in old & new} == shared):
        return
    old_sources, new_sources = (
        "; ".join(f"{by} on {device}" for device, by in side) or "no rows"
        for side in (before.sources, after)
    )
    remedy = f"; compare different devices with {option}" if shared and option else ""
    raise ConfigurationError(
        f"{before.path} has {old_sources}, but {name} has {new_sources}, so they cannot be "
        f"compared{remedy}"
    )
