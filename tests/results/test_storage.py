"""The folder of saved runs."""

from __future__ import annotations

import json
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import write_text
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome, document
from dpbench.results.rows import STEP, Measurement
from dpbench.results.storage import Storage, folder_name

CASE = Case("dpsgd", batch_size=8, seq_len=256)
H200 = "NVIDIA H200"


@cache
def text(value: float = 5.0, device: str = H200, instrument: str = "ncu", **session: Any) -> str:
    row = Measurement(CASE, instrument, STEP, "dram_read_bytes", value, "B", 0, device, "")
    return json.dumps(document([Outcome(CASE, (row,), 1.0)], {}, {"status": COMPLETE, **session}))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "runs")


def test_runs_are_numbered_under_a_folder_for_their_device(storage: Storage) -> None:
    paths = [
        storage.allocate("before", H200, text()),
        storage.allocate("after", None, text()),
        storage.allocate("before", H200, text()),
    ]
    assert [path.relative_to(storage.directory).as_posix() for path in paths] == [
        "NVIDIA-H200/0001_before.json",
        "cpu-logical/0002_after.json",
        "NVIDIA-H200/0003_before.json",
    ]
    assert [run.name for run in storage.listing()[0]] == [path.stem for path in paths]


def test_many_sessions_at_once_get_numbers_of_their_own(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda i: storage.allocate(f"run{i}", H200, text()), range(8)))
    assert sorted(path.name[:4] for path in paths) == [f"{i:04}" for i in range(1, 9)]


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "x" * 101])
def test_name_that_cannot_be_a_file_name_is_refused(storage: Storage, name: str) -> None:
    with pytest.raises(ConfigurationError, match="must be made of letters"):
        storage.allocate(name, H200, text())


def test_folder_is_named_after_the_device() -> None:
    assert folder_name("NVIDIA GeForce RTX 4090/../x") == "NVIDIA-GeForce-RTX-4090-..-x"
    assert folder_name(None) == "cpu-logical"
    assert folder_name("摩尔线程") == "gpu"


def test_damaged_and_newer_files_are_named_and_passed_over(storage: Storage) -> None:
    storage.allocate("good", H200, text(2.0))
    cut = storage.allocate("cut", H200, text(3.0)[:-9])
    newer = storage.allocate("newer", H200, text(4.0).replace('"schema": 3', '"schema": 99'))
    runs, skipped = storage.listing()
    assert [run.name for run in runs] == ["0001_good"]
    assert [str(path) in line for path, line in zip([cut, newer], skipped, strict=True)]
    assert "upgrade dpbench" in skipped[1]


@pytest.mark.parametrize("place", ["", "NVIDIA-H200"])
def test_storage_that_cannot_be_read_is_not_taken_for_an_empty_one(
    storage: Storage, place: str
) -> None:
    storage.allocate("good", H200, text())
    forbidden = storage.directory / place
    forbidden.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(ConfigurationError, match=r"storage cannot be read: .*: Permission"):
            storage.listing()
    finally:
        os.seteuid(user)
        forbidden.chmod(0o700)


def test_the_lock_of_a_shared_storage_is_no_one_users(storage: Storage) -> None:
    before = os.umask(0o077)
    try:
        storage.allocate("good", H200, text())
    finally:
        os.umask(before)
    assert stat.S_IMODE((storage.directory / ".lock").stat().st_mode) == 0o666


# --- finding ---------------------------------------------------------------------------------


def test_run_is_found_by_number_or_path(storage: Storage) -> None:
    path = storage.allocate("before", H200, text())
    assert storage.find("1") == storage.find("0001") == storage.find(str(path)) == path


def test_what_is_not_there_is_said_with_what_is(storage: Storage, tmp_path: Path) -> None:
    path = storage.allocate("before", H200, text())
    with pytest.raises(ConfigurationError, match=r"number 0007 .*; its latest runs are 0001"):
        storage.find("7")
    with pytest.raises(ConfigurationError, match=r"no run file absent\.json"):
        storage.find("absent.json")
    write_text(tmp_path / "runs/copied/0001_copy.json", path.read_text())
    with pytest.raises(ConfigurationError, match=r"0001 is both .* and .*name the file"):
        storage.find("1")


# --- resuming, and what goes wrong -----------------------------------------------------------


def test_latest_interrupted_run_is_the_one_to_resume(storage: Storage) -> None:
    skipped: list[str] = []
    assert storage.interrupted(H200, None, None, skipped) is None
    storage.allocate("first", H200, text(1.0, status=INTERRUPTED))
    storage.allocate("second", H200, text(2.0, status=INTERRUPTED))
    storage.allocate("empty", H200, json.dumps(document([], {}, {"status": INTERRUPTED})))
    storage.allocate("done", H200, text(3.0))
    damaged = storage.allocate("damaged", H200, "{")
    storage.allocate("elsewhere", None, text(4.0, status=INTERRUPTED))
    path = storage.interrupted(H200, None, None, skipped)
    assert path is not None
    assert path.name == "0002_second.json"
    assert [str(damaged) in line for line in skipped] == [True]


def test_a_named_run_is_resumed_whatever_was_interrupted_after_it(storage: Storage) -> None:
    first, _ = (storage.allocate(n, H200, text(status=INTERRUPTED)) for n in ("one", "an_other"))
    assert storage.interrupted(H200, None, "one", []) == first
    assert storage.interrupted(H200, None, "other", []) is None


def test_run_that_a_session_is_writing_is_left_to_it(storage: Storage) -> None:
    path = storage.allocate("first", H200, text(status=INTERRUPTED))
    with (
        storage.writing(path),
        pytest.raises(ConfigurationError, match="is being written"),
        Storage(storage.directory).writing(path),
    ):
        pass
    with storage.writing(path):
        assert path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_storage_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file.* cannot be written: Not a directory"):
        Storage(tmp_path / "file").allocate("before", H200, text())


def test_file_that_could_not_be_filled_is_not_left_behind(storage: Storage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the system's own refusal to write
    try:
        with pytest.raises(ConfigurationError, match=r"0001_big\.json: File too large"):
            storage.allocate("big", H200, "x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.paths() == []
