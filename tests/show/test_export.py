"""A run for other programs: exact numbers, and nothing that spoils a session."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import Case
from dpbench.core.settings import Settings
from dpbench.results.outcome import Outcome, document
from dpbench.results.rows import COLUMNS, STEP, Measurement
from dpbench.results.run import Run
from dpbench.show.layout import Table
from dpbench.show.outputs import (
    STEP_SUMMARY,
    append_step_summary,
    csv_rows,
    markdown_tables,
    summary_tables,
)
from dpbench.show.view import TableOptions


def run(measured: list[Measurement], **session: object) -> Run:
    return Run(Path("run"), document([Outcome(measured[0].case, tuple(measured))], {}, session))


UNITS = {"bytes": "B", "seconds": "s", "second": "1/s"}


def rows(trainer: str, phase: str = STEP, **metrics: list[float]) -> list[Measurement]:
    """Measurements of one case, a number for each active step."""
    case = Case(trainer, batch_size=8, seq_len=256)
    return [
        Measurement(
            case,
            "timing" if "second" in metric else "ncu",
            phase,
            metric,
            value,
            UNITS[metric.rpartition("_")[2]],
            repeat,
            "NVIDIA H200",
            "ncu 2025.3.1" if repeat == 0 else "ncu 2026.1.0",
        )
        for metric, values in metrics.items()
        for repeat, value in enumerate(values)
    ]


MEASURED = [
    *rows("standard", dram_read_bytes=[100.0], dram_write_bytes=[100.0]),
    *rows("dpsgd", dram_read_bytes=[300.0, 302.0], dram_write_bytes=[100.0, 100.0]),
    *rows("dpsgd", "clip", dram_read_bytes=[30.0], dram_write_bytes=[10.0]),
    *rows("dpsgd", step_time_seconds=[0.1, 0.3, 0.2], samples_per_second=[80.0, 26.0, 40.0]),
]


def test_a_note_of_several_cases_is_said_once() -> None:
    cases = [Case(trainer, batch_size=8, seq_len=256) for trainer in ("standard", "dpsgd", "fused")]
    outcomes = [
        Outcome(case, tuple(rows(case.trainer, dram_read_bytes=[1.0])), notes=("all alike", own))
        for case, own in zip(cases, ("first", "second", "second"), strict=True)
    ]
    *_, last = summary_tables(Run(Path("run"), document(outcomes, {}, {})))
    standard, dpsgd, _ = (case.id for case in cases)
    assert last.notes == (
        f"{standard} and 2 more cases: all alike.",
        f"{standard}: first.",
        f"{dpsgd} and 1 more case: second.",
    )


# --- CSV -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["=", "\t"])
def test_csv_has_no_formula(sign: str) -> None:
    text = f'{sign}HYPERLINK("http://example.org","run")'
    [measured] = rows(text, dram_read_bytes=[-1.0])
    outcome = Outcome(measured.case, (measured,), labels={"clips": "flat"})
    [read] = csv.DictReader(
        StringIO(csv_rows([Run(Path("r"), document([outcome], {}, {}))], TableOptions()))
    )
    assert read["trainer"] == f"'{measured.case.trainer}"
    assert (read["value"], read["labels"]) == ("-1.0", "clips flat")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 1e15) | st.integers(0, 2**60), min_size=1, max_size=4))
def test_csv_keeps_every_digit(values: list[float]) -> None:
    measured = rows("dpsgd", dram_read_bytes=values)
    read = list(csv.DictReader(StringIO(csv_rows([run(measured)], TableOptions()))))
    assert list(read[0]) == [*COLUMNS, "labels"]
    assert [{**row, "value": float(row["value"])} for row in read] == [
        {**{name: str(v) for name, v in m.as_row().items()}, "value": float(m.value), "labels": ""}
        for m in measured
    ]


def test_markdown_has_the_columns_that_were_asked_for() -> None:
    text = markdown_tables([run(MEASURED)], TableOptions.of(Settings(columns="dram_ratio")))
    assert "DRAM ÷ std" in text
    assert "DRAM read" not in text


def test_markdown_of_a_session_that_broke_off_says_what_is_missing() -> None:
    first, *_ = markdown_tables(
        [run(MEASURED, status="interrupted", cases_asked=3)], TableOptions()
    ).splitlines()
    assert first == "Not complete: 2 of the requested cases are missing."


# --- GitHub's step summary -------------------------------------------------------------------

TABLE = Table("Title", ["trainer", "GB"], [["dpsgd", "1.0"]])


def test_step_summary_is_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    path.write_text("# Before", encoding="utf-8")
    monkeypatch.setenv(STEP_SUMMARY, str(path))
    assert append_step_summary([TABLE]) is None
    assert append_step_summary([TABLE]) is None
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Before\n### Title")
    assert text.count("### Title") == 2


def test_step_summary_of_nothing_or_nowhere_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_SUMMARY, str(tmp_path / "summary.md"))
    assert append_step_summary([]) is None
    monkeypatch.setenv(STEP_SUMMARY, "")
    assert append_step_summary([TABLE]) is None
    assert list(tmp_path.iterdir()) == []


def test_step_summary_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_SUMMARY, str(tmp_path / "absent/summary.md"))
    warning = append_step_summary([TABLE])
    assert warning is not None
    assert warning.startswith(f"{STEP_SUMMARY}: {tmp_path}")
    assert "\n" not in warning
