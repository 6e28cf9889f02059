"""Tests of measuring one case, also while other sessions run."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from dpbench import Case
from dpbench.core.errors import CaseFailed
from dpbench.core.files import locked
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement
from dpbench.results.kernels import OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.runner import measure

CASE = Case("standard", batch_size=4, seq_len=64, model_size="tiny")


@dataclass(frozen=True)
class Writing(Instrument):
    """An instrument that writes a file for each case."""

    name: ClassVar[str] = "writing"

    directory: Path

    def check(self) -> None:
        """Accept any machine."""

    def start(self, case: Case) -> PendingMeasurement:
        file = self.directory / case.file_name
        file.touch()
        return Written(case, file)


class Written(PendingMeasurement):
    """A measurement that has ended and has no rows."""

    def __init__(self, case: Case, file: Path) -> None:
        self.case, self.file = case, file

    def outcome(self) -> Outcome:
        self.file.with_suffix(".measured").touch()
        return Outcome(self.case, ())

    def cancel(self) -> None:
        self.file.with_suffix(".ended").touch()


class Failing(Writing):
    """An instrument whose measurement fails after its first step."""

    def start(self, case: Case) -> PendingMeasurement:
        return FailedScript(case, self.directory / case.id)


class FailedScript(Written):
    """A measurement of a script that takes a step and then fails."""

    def outcome(self) -> Outcome:
        operators = (OperatorCount("clip", "aten.clone", 1, 8, 8, 0),)
        notes = ("operators were counted as they ran",)
        outcome = Outcome(self.case, (), operators=operators, notes=notes)
        return outcome.with_error(CaseFailed("the script failed; 1 step was counted until then"))


def test_counts_before_a_failure_are_kept(tmp_path: Path) -> None:
    outcome = measure(CASE, [Failing(tmp_path)])
    assert outcome.error == "CaseFailed"
    assert [count.operator for count in outcome.operators] == ["aten.clone"]
    assert outcome.notes == ("operators were counted as they ran",)


def test_a_case_waits_for_the_session_that_writes_the_same_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = tmp_path / ".." / tmp_path.name
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path / f".{CASE.id}.lock"):
            outcome = pool.submit(measure, CASE, [Writing(same)])
            said = ""
            while not said and not outcome.done():
                time.sleep(0.01)
                said = capsys.readouterr().err
            waiting = f"dpbench: waiting for a session that measures {CASE.id} in {tmp_path}"
            assert said.rstrip() == waiting  # the end of the line is printed separately
            assert not (tmp_path / CASE.id).exists()
        assert outcome.result().error is None
    assert (tmp_path / CASE.id).exists()


def test_a_case_whose_id_has_a_slash_is_locked_in_its_directory_too(tmp_path: Path) -> None:
    case = replace(CASE, trainable="encoder/*")
    assert measure(case, [Writing(tmp_path)]).error is None
    assert (tmp_path / f".{CASE.id}-trainable=encoder@2F*.lock").exists()


def test_a_case_waits_for_no_other_case_and_no_other_directory(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    other_case = locked(here / ".dpsgd-bs4-seq64-tiny-fp32.lock")
    with other_case, locked(there / f".{CASE.id}.lock"):
        assert measure(CASE, [Writing(here)]).error is None


def test_a_session_that_names_a_directory_twice_does_not_wait_for_itself(
    tmp_path: Path,
) -> None:
    spelled = tmp_path, tmp_path / ".." / tmp_path.name
    assert measure(CASE, [Writing(path) for path in spelled]).error is None


def test_a_case_is_measured_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert measure(CASE, [Writing(tmp_path)]).error is None
    assert (tmp_path / CASE.id).exists()


def test_directory_that_cannot_be_made_fails_the_case(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert measure(CASE, [Writing(tmp_path / "file")]).error == "NotADirectoryError"
