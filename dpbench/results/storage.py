"""The folder of saved runs, and which of them a session is compared with."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, check_writable, in_words, locked, mode_of
from dpbench.core.subject import Subject
from dpbench.results.outcome import COMPLETE, INTERRUPTED
from dpbench.results.run import Run

LOGICAL = "cpu-logical"
"""The folder of runs that counted without hardware."""

_FILE = re.compile(r"(\d{4,})_([^\x00-\x1f\x7f-\x9f]+)\.json")


def folder_name(device: str | None) -> str:
    """The folder for a device, e.g. ``NVIDIA-H200``; None stands for no hardware."""
    if not device:
        return LOGICAL
    return re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-.") or "gpu"


class Storage:
    """A directory with one folder a device and one numbered file a run, ``0001_NAME.json``.

    Numbers count through all folders, so that one number names one run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def paths(self) -> list[Path]:
        """The files of runs by number, readable or not.

        A storage that is no directory or is unreadable is an error, because it may have runs.
        """
        paths: list[Path] = []
        try:
            for folder in self.directory.iterdir():
                if folder.is_dir():
                    paths += (path for path in folder.iterdir() if _FILE.fullmatch(path.name))
        except FileNotFoundError:
            pass  # nothing was saved yet
        except OSError as error:
            raise ConfigurationError(f"storage cannot be read: {in_words(error)}") from error
        return sorted(paths, key=lambda path: (_number(path), path.name))

    def listing(self) -> tuple[list[Run], list[str]]:
        """Every readable run, by number, and why others were skipped."""
        skipped: list[str] = []
        return list(readable(self.paths(), Run.load, skipped)), skipped

    def find(self, text: str) -> Path:
        """The file of a run, found by its number, its path or its name; of several, the newest."""
        if not re.fullmatch(r"\d{1,18}", text):
            if stat.S_ISREG(mode_of(Path(text))):
                return Path(text)
            return self._named(text)
        paths, number = self.paths(), f"run number {int(text):04}"
        matching = [path for path in paths if _number(path) == int(text)]
        if not matching:
            numbers = ", ".join(f"{_number(path):04}" for path in paths[-10:])
            raise ConfigurationError(
                f"no {number} in {self.directory}; there is {numbers or 'none'}"
            )
        if len(matching) > 1:
            listed = " and ".join(map(str, matching))
            raise ConfigurationError(f"{number} is both {listed}; name the file")
        return matching[0]

    def _named(self, name: str) -> Path:
        """The newest run that was saved under a name."""
        saved = {_name(path): path for path in self.paths()}
        if name in saved:
            return saved[name]
        nearest = "".join(f"; did you mean {each}?" for each in get_close_matches(name, saved, 1))
        where = f"no run file {name}, and no run of that name in {self.directory}"
        raise ConfigurationError(f"{where}; dpbench list shows what is saved{nearest}")

    def candidates(self, devices: Iterable[str]) -> list[Path]:
        """The files of runs on these devices, and of counted ones, the newest first."""
        folders = {LOGICAL, *map(folder_name, devices)}
        return [path for path in reversed(self.paths()) if path.parent.name in folders]

    def interrupted(
        self, device: str | None, shard: str | None, name: str | None, skipped: list[str]
    ) -> Path | None:
        """The path of a device's latest interrupted run that has a case; None if there is none.

        Only runs of this ``shard`` count; with None, only runs that are no shard. If ``name`` is
        given, only runs with that name count. Why files could not be read is added
        to ``skipped``.
        """
        paths = [
            path
            for path in reversed(self.paths())
            if path.parent.name == folder_name(device) and name in (None, _name(path))
        ]
        for run in readable(paths, Run.load, skipped):
            of_it = run.session.get("grid", {}).get("shard") == shard
            if of_it and run.status == INTERRUPTED and run.document.get("cases"):
                return run.path
        return None

    def allocate(self, name: str, device: str | None, text: str) -> Path:
        """Create the file of the next number with this text; each session gets its own number."""
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
                    continue  # without locks another session may be faster
                except OSError as error:
                    path.unlink(missing_ok=True)  # else it would be reported as damaged
                    raise ConfigurationError(f"{path}: {error.strerror}") from error

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Lock a run's file while a session writes it; the lock ends with the process."""
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
    """Whether a session holds a run's file now, as far as this user can tell."""
    try:
        with locked(_lock(path), wait=False) if _lock(path).exists() else nullcontext():
            return False
    except Locked:
        return True


def _lock(path: Path) -> Path:
    """The lock file of a session that writes this run."""
    return path.with_name(f".{path.stem}.lock")


def _number(path: Path) -> int:
    return int(path.name.partition("_")[0])


def _name(path: Path) -> str:
    return path.stem.partition("_")[2]


def readable(
    paths: Iterable[Path], load: Callable[[Path], Run], skipped: list[str]
) -> Iterator[Run]:
    """The runs that can be read; why others cannot is added to ``skipped``."""
    for path in paths:
        try:
            yield load(path)
        except ConfigurationError as error:
            skipped.append(f"skipped: {error}")


# --- which run a session is compared with ----------------------------------------------------


def latest_passed_run(
    newest_first: Iterable[Path],
    sources: Collection[tuple[str, str]],
    asked: Collection[tuple[Subject, str]],
    notes: list[str],
) -> Run | None:
    """The latest complete run that passed its own comparison, if there is one.

    Args:
        newest_first: the candidates.
        sources: each (device, instrument) the session may use; a reference has rows of one.
        asked: if not empty, a reference has one of these cases by its instrument.
        notes: gets why files are unreadable and, without a reference, why a run was rejected.
    """
    skipped, passed_over, wanted = list[str](), list[str](), {*asked}
    for run in readable(newest_first, Run.load, skipped):
        if {*sources}.isdisjoint(run.sources) or (wanted and wanted.isdisjoint(run.places)):
            continue
        if run.verdict == COMPLETE:
            notes += skipped
            return run
        passed_over.append(f"{run.name} is {run.verdict}; to compare with it, name it")
    notes += [*skipped, *passed_over[:1]]
    return None


def check_comparable(
    before: Run, after: Collection[tuple[str, str]], name: str, *, across: bool, option: str
) -> None:
    """Refuse to compare different devices, or runs without a common instrument.

    ``after`` has each (device, instrument) of the run called ``name``; with ``across``, which
    ``option`` sets, the devices may differ.
    """
    old, new = set(before.sources), set(after)
    shared = {by for _, by in old} & {by for _, by in new}
    if shared and (across or {by for _, by in old & new} == shared):
        return
    there, here = (
        "; ".join(f"{by} on {device}" for device, by in side) or "nothing"
        for side in (before.sources, after)
    )
    remedy = f"; {option} does it all the same" if shared and option else ""
    raise ConfigurationError(f"{before.path} holds {there}, {name} {here}: not compared{remedy}")
