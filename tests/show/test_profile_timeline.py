"""What Nsight Systems recorded, as tables: of rows, and of a file without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpbench import Case
from dpbench.cli import main
from dpbench.instruments.nsys.nsys import timeline_rows
from dpbench.instruments.nsys.sqlite import read_timeline
from dpbench.results.frame import to_frame
from dpbench.results.outcome import Outcome
from dpbench.results.timeline import Timeline
from dpbench.show.export import summary_tables
from dpbench.show.layout import Table
from dpbench.show.profile import recorded_tables, whole_timeline
from tests.instruments.nsys.recording import Recording, case_recording

CASE = Case("dpsgd", 2, 16, "tiny")
FILL = "vectorized_elementwise_k\nernel<FillFunctor>"  # a name in lines that fit a column
BY_PHASE = [
    ["forward", "0.20", "0.15", "75%", "2"],
    ["clip", "0.10", "0.01", "10%", "1"],
    ["outside", "0.01", "0.00", "0%", "0"],
    ["step", "0.31", "0.16", "52%", "2"],
]


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return read_timeline(case_recording().write(tmp_path / "dpsgd.sqlite"))


def found(tables: list[Table], title: str) -> Table:
    [table] = [table for table in tables if title in table.title]
    return table


def test_a_run_shows_how_busy_the_gpu_was_in_each_phase(timeline: Timeline) -> None:
    rows = tuple(timeline_rows(CASE, timeline, "NVIDIA H200", "nsys 2025.3.1"))
    outcome = Outcome(CASE, rows, 1.0, instruments=("nsys",))
    table, trainers = summary_tables([outcome])  # and no table of what nsys does not measure
    assert trainers.title == "Cases by trainer"
    assert table.title == (
        "dpsgd, tiny fp32, batch 2, sequence 16, NVIDIA H200: Nsight Systems, per step"
    )
    assert table.headers == ["phase", "ms", "GPU busy\nms", "busy", "launches"]
    assert table.cells == BY_PHASE
    assert recorded_tables(to_frame([])) == []


def test_a_timeline_shows_the_same_as_the_run(timeline: Timeline) -> None:
    table = found(whole_timeline(timeline, "dpsgd"), ": per step")
    assert table.title.startswith("dpsgd, NVIDIA H200, nsys 2022.4.2.1")
    assert table.cells == BY_PHASE


def test_waits_are_summed_by_phase_and_by_what_ended_them(timeline: Timeline) -> None:
    tables = whole_timeline(timeline, "dpsgd")
    by_phase = found(tables, "waits by phase")
    assert by_phase.headers == ["phase", "gaps", "ms", "µs each", "in CUDA\ncalls"]
    assert by_phase.cells == [
        ["clip", "1", "0.10", "100.0", "5%"],
        ["outside", "1", "0.03", "30.0", "97%"],
        ["forward", "1", "0.02", "20.0", "25%"],
    ]
    assert [line[0] for line in found(tables, "what the GPU waited for").cells] == [
        "memcpy Device-to-Device",
        "the end of the step",
        FILL,
    ]


def test_the_longest_gaps_say_what_the_cpu_did(timeline: Timeline) -> None:
    table = found(whole_timeline(timeline, "dpsgd"), "the longest gaps")
    assert table.cells[0] == [
        *("0.17", "0.11", "clip", "memcpy Device-to-Device", "cudaMemcpyAsync 5%"),
    ]
    assert len(table.cells) == 6


def test_kernels_and_copies_are_sums_of_a_step(timeline: Timeline) -> None:
    table = found(whole_timeline(timeline, "dpsgd"), "kernels and copies")
    assert table.cells == [
        [FILL, "1", "0.15", "93.8%", "-"],
        ["memcpy Device-to-Device", "1", "0.01", "6.2%", "0.004"],
    ]


def test_show_reads_an_exported_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = case_recording().write(tmp_path / "report.sqlite")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^step +0\.31 +0\.16 +52% +2$", shown, re.MULTILINE)
    assert "waits by phase" in shown


def test_a_program_of_others_is_one_step(tmp_path: Path) -> None:
    made = Recording()
    made.kernel(0, 10)
    made.kernel(30, 40)
    tables = whole_timeline(read_timeline(made.write(tmp_path / "a.sqlite")), "other")
    assert found(tables, ": per step").cells == [["step", "0.04", "0.02", "50%", "2"]]
    assert found(tables, "the longest gaps").cells[0][2:] == [
        *("outside", FILL, "no call of CUDA"),
    ]


def test_timelines_are_shown_one_below_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [case_recording().write(tmp_path / name) for name in ("a.sqlite", "b.sqlite")]
    assert main(["show", *map(str, paths)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("waits by phase") == 2
    assert re.search("^a, .*^b, ", shown, re.MULTILINE | re.DOTALL)
