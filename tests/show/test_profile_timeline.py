"""What Nsight Systems recorded, as tables: of rows, and of a file without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpbench import Case
from dpbench.commands.cli import main
from dpbench.instruments.nsys.nsys import timeline_rows
from dpbench.instruments.nsys.timeline import Timeline, read_timeline
from dpbench.results.outcome import Outcome
from dpbench.results.run import Run
from dpbench.results.summary import summary, to_frame
from dpbench.show.outputs import summary_tables
from dpbench.show.profile import NO_STATISTICS, recorded_tables, timeline_tables
from tests.instruments.nsys.recording import FILL, case_recording

CASE = Case("dpsgd", 2, 16, "tiny")
STATISTICS = {
    "cuda_gpu_kern_sum": (
        "Time (%),Total Time (ns),Instances,Name\n"
        f'93.8,310000,2,"{FILL}"\n'
        "6.2,10000,1,nvjet_tst_128x64_TNT\n"
    ),
    "cuda_gpu_mem_size_sum": "Total (MB),Count,Operation\n4.000,1,[CUDA memcpy Device-to-Device]\n",
}
"""What ``nsys stats --format csv`` leaves, with fewer columns."""

BY_PHASE = [
    ["forward", "0.20", "0.15", "75%", "2"],
    ["clip", "0.10", "0.01", "10%", "1"],
    ["outside", "0.01", "0.00", "0%", "0"],
    ["step", "0.31", "0.16", "52%", "2"],
]


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return read_timeline(case_recording().write(tmp_path / "dpsgd.sqlite"))


def test_a_run_shows_how_busy_the_gpu_was_in_each_phase(timeline: Timeline) -> None:
    rows = tuple(timeline_rows(CASE, timeline, "NVIDIA H200", "nsys 2025.3.1"))
    outcome = Outcome(CASE, rows, 1.0, instruments=("nsys",))
    table, trainers = summary_tables(
        Run.of("run", [outcome])
    )  # and no table of what nsys does not measure
    assert trainers.title == "Cases by trainer"
    assert table.title == (
        "dpsgd, tiny fp32, batch 2, sequence 16, NVIDIA H200: Nsight Systems, per step"
    )
    assert table.headers == ["phase", "ms", "GPU busy\nms", "busy", "launches"]
    assert table.cells == BY_PHASE
    assert recorded_tables(summary(to_frame([])), to_frame([])) == []


def test_a_timeline_shows_the_same_as_the_run(timeline: Timeline) -> None:
    [table] = timeline_tables(timeline.usages(), {}, "dpsgd")
    assert table.title == "dpsgd: per step"
    assert table.cells == BY_PHASE
    assert table.notes[-1] == NO_STATISTICS


def test_statistics_of_nsys_are_tables_with_the_names_first(timeline: Timeline) -> None:
    by_phase, kernels, copies = timeline_tables(timeline.usages(), STATISTICS, "dpsgd")
    assert NO_STATISTICS not in by_phase.notes
    assert kernels.title == "dpsgd: cuda_gpu_kern_sum"
    assert kernels.headers == ["Name", "Time (%)", "Total Time (ns)", "Instances"]
    assert kernels.cells == [
        ["vectorized_elementwise_k\nernel<FillFunctor>", "93.8", "310000", "2"],
        ["nvjet_tst_128x64_TNT", "6.2", "10000", "1"],
    ]
    assert copies.cells == [["[CUDA memcpy Device-to-\nDevice]", "4.000", "1"]]


def test_show_reads_an_exported_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = case_recording().write(tmp_path / "report.sqlite")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "report, NVIDIA H200, nsys 2022.4.2.1: per step" in shown
    assert re.search(r"^step +0\.31 +0\.16 +52% +2$", shown, re.MULTILINE)
