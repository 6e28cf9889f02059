"""Files: control characters, locks, and file systems that have none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dpbench.files import Locked, locked, printable, write_text
from dpbench.results.storage import Storage


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[31mb\x07\x9b\n\tµ") == "a\ufffd[31mb\ufffd\ufffd\n\tµ"


def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as held:
        assert held
        with pytest.raises(Locked), locked(tmp_path / "lock", wait=False):
            pass
    with locked(tmp_path / "lock", wait=False) as held:
        assert held


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, errno.ENOSYS])
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


def test_a_pipe_or_device_is_written_to_and_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "rows")
        assert os.read(reader, 10) == b"rows"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
