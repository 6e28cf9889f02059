"""Files: control characters, locks, and file systems that have none."""

from __future__ import annotations

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import (
    Locked,
    check_writable,
    check_writable_file,
    in_words,
    is_standard_output,
    locked,
    printable,
    read_file,
    write_text,
)
from dpbench.results.storage import Storage


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[31mb\x07\x9b\n\tµ") == "a\ufffd[31mb\ufffd\ufffd\n\tµ"


@pytest.mark.parametrize("sign", "\u061c\u200e\u200f\u202a\u202e\u2066\u2069")
def test_signs_that_turn_the_direction_of_writing_are_not_printed(sign: str) -> None:
    assert printable(f"ab{sign}c שלום") == "ab\ufffdc שלום"


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


def test_a_pipe_that_nobody_reads_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address") as caught:
        write_text(tmp_path / "pipe", "rows")
    assert in_words(caught.value) == f"{tmp_path}/pipe: No such device or address"


def test_more_than_a_pipe_holds_is_written_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "row\n" * 100_000
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        while True:
            with suppress(OSError):  # it is not open yet
                write_text(tmp_path / "pipe", text)
                break
        assert read.result() == text


def test_a_signal_ends_the_writing_to_a_pipe_that_is_full(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            write_text(tmp_path / "pipe", "row\n" * 100_000)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(reader)


def test_an_open_file_is_written_to_where_it_stands(tmp_path: Path) -> None:
    """As ``--json /dev/stdout >run.txt`` has it."""
    with (tmp_path / "out").open("w") as stream:
        stream.write("before\n")
        stream.flush()
        write_text(Path(f"/dev/fd/{stream.fileno()}"), "rows\n")
        stream.write("after\n")
    assert (tmp_path / "out").read_text() == "before\nrows\nafter\n"


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "results.json")
    write_text(tmp_path / "link", "rows")
    assert (tmp_path / "results.json").read_text() == "rows"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "results.json"}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("url", ["file:///tmp/runs", "file://./.dpbench", "s3://bucket/runs"])
def test_a_url_is_refused_before_a_directory_is_called_like_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"is a URL; name a path, without {url.partition('/')[0]}"
    for refuses in (Storage, check_writable, check_writable_file):
        for path in (Path(url), tmp_path / url):
            with pytest.raises(ConfigurationError, match=words):
                refuses(path)
    assert not [*tmp_path.iterdir()]


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a pipe or a device"):
            read_file(path)


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


def test_a_lock_that_somebody_has_made_a_pipe_or_a_folder_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with locked(tmp_path / name) as held:
            assert held is None


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


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        ("/dev/stdout", True),
        ("/dev/fd/1", True),
        ("/proc/self/fd/1", True),
        ("/dev/stderr", False),
        ("/dev/fd/11", False),
        ("/dev/fd/2", False),
        ("stdout", False),
    ],
)
def test_standard_output_has_several_names(name: str, is_it: bool) -> None:
    assert is_standard_output(Path(name)) == is_it
