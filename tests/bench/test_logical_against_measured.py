"""Measured beside logical bytes and peak memory of the documents in docs/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import logical_against_measured as bench
from dpbench.case import Case
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement

BY_BOTH = Path(__file__).parents[1] / "data/saved/cupti-and-ncu.json"


def test_peak_memory_stands_beside_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(case: Case) -> list[Measurement]:
        ten = {"logical_read_bytes": 6e9, "logical_write_bytes": 4e9, "peak_memory_bytes": 10e9}
        where = "B", 0, NO_HARDWARE, "1"
        return [Measurement(case, "logical", STEP, name, ten[name], *where) for name in ten]

    monkeypatch.setattr(bench, "counted", counted)
    [table] = bench.side_by_side(BY_BOTH)
    shown = [dict(zip(table.headers, cells, strict=True)) for cells in table.cells]
    assert [(row["step"], row["peak\nmem."]) for row in shown] == [
        ("9.13", "1.271"),
        ("41.25", "5.963"),
    ]


def test_help_counts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "counted", pytest.fail)
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help"])
    assert "Logical bytes and peak memory" in capsys.readouterr().out
