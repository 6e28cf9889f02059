"""A committed reference is rewritten where it was measured anew, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.results.outcome import Outcome, document
from dpbench.results.reference import check_same_device, updated
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run

STANDARD = Case("standard", 8, 256)
DPSGD = Case("dpsgd", 8, 256)


def outcome(case: Case, value: float, *instruments: str, device: str = "NVIDIA H200") -> Outcome:
    rows = tuple(
        Measurement(case, name, STEP, "peak_memory_bytes", value, "B", 0, device, "")
        for name in instruments
    )
    return Outcome(case, rows, 1.0, instruments=instruments)


OLD = [outcome(STANDARD, 1, "timing", "ncu"), outcome(DPSGD, 2, "timing", "ncu")]


def test_measured_case_takes_the_place_of_the_old_one() -> None:
    new = outcome(STANDARD, 5, "timing", "ncu")
    update = updated(OLD, [new])
    assert update.outcomes == [new, OLD[1]]
    assert (update.rewritten, update.added) == (1, 0)


def test_instrument_that_was_not_used_keeps_its_rows() -> None:
    new = outcome(STANDARD, 5, "ncu")
    update = updated(OLD, [new])
    assert update.outcomes == [outcome(STANDARD, 1, "timing"), new, OLD[1]]
    assert (update.rewritten, update.added) == (1, 0)


def test_case_or_instrument_that_is_new_is_added() -> None:
    counted, other = outcome(DPSGD, 7, "logical"), outcome(Case("dpsgd_fgc", 8, 256), 3, "ncu")
    update = updated(OLD, [counted, other])
    assert update.outcomes == [*OLD, counted, other]
    assert (update.rewritten, update.added) == (0, 2)


def test_new_only_leaves_what_is_there() -> None:
    measured = [outcome(STANDARD, 5, "timing", "ncu"), outcome(DPSGD, 5, "ncu", "logical")]
    update = updated(OLD, measured, new_only=True)
    assert update.outcomes == [*OLD, outcome(DPSGD, 5, "logical")]
    assert update.written == {DPSGD.id: ["logical"]}
    assert (update.rewritten, update.added) == (0, 1)


def test_case_that_failed_leaves_the_old_one() -> None:
    failed = Outcome(STANDARD, (), 1.0, error="CaseOutOfMemory")
    assert updated(OLD, [failed]).outcomes == OLD


def test_update_with_what_is_there_changes_nothing() -> None:
    assert updated(OLD, OLD).outcomes == OLD


def test_rows_of_another_device_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps(document(OLD, {})))
    reference = Run.load(path)
    check_same_device(reference, [outcome(STANDARD, 5, "ncu")])
    check_same_device(reference, [outcome(STANDARD, 5, "logical", device="none")])
    with pytest.raises(ConfigurationError, match=r"ncu on NVIDIA H200, and this is NVIDIA A100"):
        check_same_device(reference, [outcome(STANDARD, 5, "ncu", device="NVIDIA A100")])
