"""Files: control characters, locks, and file systems that have none."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import (
    Locked,
    check_writable_file,
    locked,
    printable,
    write_text,
)
from dpbench.results.storage import Storage


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[31mb\x07\x9b\n\tµ\u202e") == "a\ufffd[31mb\ufffd\ufffd\n\tµ\ufffd"


def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as held:
        assert held
        with pytest.raises(Locked), locked(tmp_path / "lock", wait=False):
            pass
    with locked(tmp_path / "lock", wait=False) as held:
        assert held


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(error, "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path / "lock") as held:
        assert not held
    storage = Storage(tmp_path / "runs")
    first = storage.allocate("first", None, "{}")
    with storage.writing(first):
        assert storage.allocate("second", None, "{}").name == "0002_second.json"


def test_without_locks_two_sessions_take_different_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    paths = storage.paths
    taken = storage.allocate("run", None, "{}")
    seen = iter([[], paths()])  # the other session's file was not there yet
    monkeypatch.setattr(storage, "paths", lambda: next(seen))
    assert storage.allocate("run", None, "{}").name == "0002_run.json"
    assert taken.read_text() == "{}"


def test_a_pipe_is_neither_written_nor_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is not a file"):
        write_text(pipe, "rows")
    with pytest.raises(ConfigurationError, match="pipe' is a pipe or a device; name a file"):
        check_writable_file(pipe)
    assert [each.is_fifo() for each in tmp_path.iterdir()] == [True]


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "results.json")
    write_text(tmp_path / "link", "rows")
    assert (tmp_path / "results.json").read_text() == "rows"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "results.json"}
    assert (tmp_path / "link").is_symlink()


# --- in a folder that others can write to ----------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_that_somebody_has_made_a_link_is_not_followed(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "somebody's"
    if exists:
        target.write_text("content")
    (tmp_path / "lock").symlink_to(target)
    with locked(tmp_path / "lock") as held:
        assert held is None
    assert target.exists() == exists
    assert not exists or target.read_text() == "content"


def test_what_is_written_before_it_is_whole_goes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("content")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".run.json.guessed.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "run.json", "rows")
    assert victim.read_text() == "content"
    assert not (tmp_path / "run.json").exists()


def test_many_processes_that_make_and_remove_one_lock_hold_it_one_at_a_time(tmp_path: Path) -> None:
    path, inside = tmp_path / "lock", []

    def hold(number: int) -> None:
        with locked(path) as held:
            assert held
            inside.append(number)
            assert len(inside) == 1
            inside.remove(number)
            path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(200)))
