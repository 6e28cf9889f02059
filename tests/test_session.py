"""Tests of a session's file: when it is written, locked, resumed and removed."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dpbench.core.case import Case
from dpbench.core.errors import CaseFailed, ConfigurationError
from dpbench.core.settings import Settings
from dpbench.core.subject import Asked
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement
from dpbench.results.limits import Judgement
from dpbench.results.outcome import Outcome, document
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.session import References, Session

DONE = Case("standard", batch_size=8, seq_len=256)
FAILS = Case("dpsgd", batch_size=8, seq_len=256)


class Meter(Instrument):
    """An instrument that returns one row at once, and fails for one trainer."""

    name: ClassVar[str] = "meter"

    def start(self, case: Case) -> PendingMeasurement:
        return Metered(case)


class Metered(PendingMeasurement):
    def __init__(self, case: Case) -> None:
        self.case = case

    def outcome(self) -> Outcome:
        if self.case == FAILS:
            raise CaseFailed("it failed")
        row = Measurement(self.case, "meter", STEP, "step_time_seconds", 5.0, "s", 0, "cpu", "")
        return Outcome(self.case, (row,))


Begin = Callable[..., Session]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "runs")


@pytest.fixture
def begin(tmp_path: Path, storage: Storage) -> Iterator[Begin]:
    """Return a function that begins a session which saves its run."""
    with ExitStack() as ending:

        def begin(**settings: Any) -> Session:
            chosen = Settings(
                device="cpu", directory=tmp_path, storage=storage.directory, **settings
            )
            session = Session([], chosen, instruments=[Meter()])
            ending.callback(session.close)
            session.begin()
            return session

        yield begin


def file_of(session: Session) -> Path:
    assert session.files.path is not None
    return session.files.path


def interrupted_run(begin: Begin) -> Run:
    """Return a run whose session was interrupted."""
    session = begin(save="first")
    for case in (DONE, FAILS):
        session.measure(case)
    session.began -= 1000
    session.finish(complete=False)
    return Run.load(file_of(session))


def failing(*_: object, **__: object) -> None:
    """Raise the error of a read-only file system."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def saved(session: Session) -> tuple[str, list[Case]]:
    """Return the status and the cases in the run's file."""
    run = Run.load(file_of(session))
    return run.status, [outcome.case for outcome in run.outcomes]


def test_file_is_interrupted_until_its_session_is_over(begin: Begin) -> None:
    session = begin(save="first")
    assert saved(session) == ("interrupted", [])
    session.measure(DONE)
    assert saved(session) == ("interrupted", [DONE])
    session.finish(complete=True)
    assert saved(session) == ("complete", [DONE])
    assert Run.load(file_of(session)).session["grid"]["batch_size"] == [8, 16]
    assert session.notes == [f"saved {session.files.path}"]


def test_a_resumed_run_keeps_successful_cases_and_adds_its_time(begin: Begin) -> None:
    run = interrupted_run(begin)
    session = begin(resume=True)
    assert session.files.path == run.path
    assert [outcome.case for outcome in session.store.outcomes()] == [DONE]
    with pytest.raises(ConfigurationError, match="is being written"):
        begin(resume=True)
    session.finish(complete=True)
    assert 1000 <= run.session["seconds"] <= Run.load(run.path).session["seconds"] < 1100


def test_a_run_that_cannot_be_resumed_is_unlocked(begin: Begin, storage: Storage) -> None:
    path = interrupted_run(begin).path
    held = path.read_bytes()
    with pytest.raises(ConfigurationError, match="grid's batch_size"):
        begin(resume=True, grid="grid2")
    with storage.writing(path):
        assert path.read_bytes() == held


def test_a_storage_that_became_read_only_is_refused_before_a_run_is_resumed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_run(begin)

    monkeypatch.setattr("tempfile.TemporaryFile", failing)
    with pytest.raises(ConfigurationError, match=r"cannot be written: Read-only file system"):
        begin(resume=True)


def test_a_full_disk_leaves_the_earlier_file(begin: Begin, storage: Storage) -> None:
    session = begin(save="first")
    session.measure(DONE)
    held = file_of(session).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(held), hard))
    try:
        session.measure(FAILS)
        session.finish(complete=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file_of(session).read_bytes() == held
    assert [path.name for path in file_of(session).parent.iterdir()] == ["0001_first.json"]
    [problem] = session.problems
    assert problem.endswith("0001_first.json: File too large; cases in the file: 1")
    assert session.failed


def test_a_file_without_a_case_is_removed_after_a_full_disk(begin: Begin, storage: Storage) -> None:
    session = begin(save="first")
    size = file_of(session).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        session.measure(DONE)
        session.finish(complete=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert session.problems[0].endswith("File too large; cases in the file: 0")
    assert storage.paths() == []


def test_a_file_without_a_case_is_removed(begin: Begin, storage: Storage) -> None:
    session = begin(autosave=True)
    assert file_of(session).name.startswith("0001_2")
    session.finish(complete=True)
    assert storage.paths() == []
    assert (session.notes, session.problems) == ([], [])


def test_file_that_cannot_be_removed_does_not_end_the_session(
    begin: Begin, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(save="first")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", failing)
        session.finish(complete=True)
    with storage.writing(file_of(session)):
        assert saved(session) == ("interrupted", [])


# --- the reference ---------------------------------------------------------------------------

H200 = "NVIDIA H200"


def saved_text(instrument: str = "ncu", device: str = H200, **session: Any) -> str:
    """The document of a run with one number of one case."""
    row = Measurement(DONE, instrument, STEP, "dram_read_bytes", 5.0, "B", 0, device, "")
    conditions = {"status": "complete", **session}
    return json.dumps(document([Outcome(DONE, (row,), 1.0)], {}, conditions))


def found(storage: Storage, asked: Asked) -> tuple[str, list[str]]:
    """The name of the run with which something is compared, and what is said of it."""
    session = Session([], Settings(storage=storage.directory), instruments=[Meter()])
    with closing(session):
        references = References(session.settings, [(H200, "ncu")], session.files)
        run = references.of(asked)
        return run.name, [*references.notes(run, asked, Judgement())]


def test_reference_is_the_latest_run_that_passed_and_has_what_is_asked_for(
    storage: Storage,
) -> None:
    assert found(storage, []) == ("the storage", [])
    storage.allocate("old", H200, saved_text())
    storage.allocate("good", H200, saved_text())
    storage.allocate("of_another_instrument", H200, saved_text("cupti"))
    storage.allocate("worse", H200, saved_text(regressed=True))
    storage.allocate("cut", H200, saved_text(status="interrupted"))
    storage.allocate("elsewhere", "NVIDIA A100", saved_text(device="NVIDIA A100"))
    assert found(storage, []) == ("0002_good", ["compared with 0002_good"])
    assert found(storage, [(DONE, "ncu")]) == found(storage, [])
    assert found(storage, [(FAILS, "ncu")]) == ("the storage", [])


def test_why_there_is_no_reference_is_said(storage: Storage) -> None:
    damaged = storage.allocate("damaged", H200, "{")
    storage.allocate("worse", H200, saved_text(regressed=True))
    name, [skipped, passed_over] = found(storage, [])
    assert name == "the storage"
    assert str(damaged) in skipped
    assert passed_over == (
        "0002_worse is not compared, because it is regressed; name it to compare with it"
    )
