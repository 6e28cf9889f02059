"""How each trainer did: success rate, peak memory, and the reason of each failure."""

from __future__ import annotations

from typing import Any

from dpbench.core.case import Case
from dpbench.results.outcome import Outcome, trainer_summary
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.show.outputs import trainer_table


def outcome(
    trainer: str,
    peak: float | None = None,
    *,
    batch_size: int = 8,
    instrument: str = "timing",
    **fields: Any,
) -> Outcome:
    """The outcome of a case, with the peak memory that was found, if any."""
    case = Case(trainer, batch_size, seq_len=256)
    device = NO_HARDWARE if instrument == "logical" else "H200"
    row = Measurement(case, instrument, STEP, "peak_memory_bytes", peak or 0, "B", 0, device, "t 1")
    by = ("logical",) if instrument == "logical" else ("timing", "ncu")
    return Outcome(case, (row,) if peak is not None else (), 1.5, instruments=by, **fields)


def failed(trainer: str, peak: float | None = None, **fields: Any) -> Outcome:
    """The outcome of a case that did not fit."""
    error = {"error": "CaseOutOfMemory", "message": "CUDA out of memory", "log": "case.log"}
    return outcome(trainer, peak, **{**error, **fields})


def test_summary_counts_what_succeeded_and_finds_the_largest_peak() -> None:
    found = trainer_summary(
        [
            outcome("standard", 9e9),
            outcome("dpsgd", 6e9),
            outcome("standard", 4e9, batch_size=16),
            failed("dpsgd", batch_size=16),
            failed("dpsgd_ghost"),
        ]
    )
    keys = ("trainer", "ok", "failed", "success_rate", "peak_memory_bytes")
    assert [tuple(line[key] for key in keys) for line in found] == [
        ("standard", 2, 0, 1.0, 9e9),
        ("dpsgd", 1, 1, 0.5, 6e9),
        ("dpsgd_ghost", 0, 1, 0.0, None),
    ]


def test_summary_names_each_failure_of_a_trainer_with_its_reason() -> None:
    standard, dpsgd = trainer_summary([outcome("standard"), failed("dpsgd", batch_size=16)])
    assert standard["failures"] == []
    assert dpsgd["failures"] == [
        {
            "case": "dpsgd-bs16-seq256-1b-fp32",
            "error": "CaseOutOfMemory",
            "message": "CUDA out of memory",
            "log": "case.log",
        }
    ]


def test_predicted_peak_never_passes_for_a_measured_one() -> None:
    [line] = trainer_summary([outcome("dpsgd", 8e9, instrument="logical")])
    assert (line["peak_memory_bytes"], line["logical_peak_memory_bytes"]) == (None, 8e9)


def test_cases_that_were_measured_and_counted_have_a_line_each() -> None:
    found = trainer_summary(
        [outcome("dpsgd", 8e9), outcome("dpsgd", 7e9, instrument="logical"), outcome("standard")]
    )
    keys = ("trainer", "instruments", "ok", "peak_memory_bytes", "logical_peak_memory_bytes")
    assert [tuple(line[key] for key in keys) for line in found] == [
        ("standard", ["timing", "ncu"], 1, None, None),
        ("dpsgd", ["timing", "ncu"], 1, 8e9, None),
        ("dpsgd", ["logical"], 1, None, 7e9),
    ]


def test_table_says_how_many_cases_of_each_trainer_succeeded_and_why_not() -> None:
    outcomes = [outcome("standard", 7e9), outcome("dpsgd", 7e9), failed("dpsgd", batch_size=16)]
    table = trainer_table(trainer_summary(outcomes), ["A note."])
    assert table.headers == ["trainer", "instruments", "cases\nok", "success", "peak\nmemory"]
    assert table.cells == [
        ["standard", "timing, ncu", "1/1", "100%", "7.00 GB"],
        ["dpsgd", "timing, ncu", "1/2", "50%", "7.00 GB"],
    ]
    assert table.notes == ("CaseOutOfMemory: CUDA out of memory", "A note.")


def test_peak_that_was_not_measured_is_a_dash() -> None:
    table = trainer_table(trainer_summary([failed("dpsgd")]))
    assert table.cells == [["dpsgd", "timing, ncu", "0/1", "0%", "-"]]


def test_predicted_peak_has_a_column_of_its_own() -> None:
    table = trainer_table(trainer_summary([outcome("dpsgd", 8e9, instrument="logical")]))
    assert table.headers[-2:] == ["peak\nmemory", "logical\npeak"]
    assert table.cells == [["dpsgd", "logical", "1/1", "100%", "-", "8.00 GB"]]
