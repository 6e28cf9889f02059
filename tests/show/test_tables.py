"""The tables that people read, in a terminal and in Markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.core.subject import Script
from dpbench.instruments.timing import timing_rows
from dpbench.results.summary import summary, to_frame
from dpbench.show.layout import Table
from dpbench.show.tables import tables
from tests.results.figures import (
    FIGURES,
    GB,
    by_phase,
    column,
    dram,
    every_figure,
    notes,
    rows,
    tables_of,
    timed_run,
)

# --- the step --------------------------------------------------------------------------------


def test_step_table_has_gigabytes_ratios_and_milliseconds() -> None:
    step = tables_of(every_figure())[0]
    assert step.title == "1b fp32, batch 16, sequence 1024, H200: GB per step"
    assert [header.replace("\n", " ") for header in step.headers] == [
        *("trainer", "DRAM ÷ std", "step ÷ std", "peak ÷ std", "L2 ÷ std"),
        *("DRAM total", "step ms", "peak mem.", "L2 served"),
    ]
    assert step.cells[:2] == [
        ["standard", "1.00", "1.00", "1.00", "1.00", "889.7", "2801.7", "71.9", "5120.7"],
        ["dpsgd", "2.55", "2.00", "1.92", "2.00", "2267.6", "5594.2", "138.2", "10240.1"],
    ]


def test_a_time_whose_steps_differ_by_more_than_a_tenth_is_a_range() -> None:
    def step(*seconds: float) -> str:
        taken = [rows("dpsgd", {"step_time_seconds": each})[0] for each in seconds]
        numbered = [replace(each, repeat=number) for number, each in enumerate(taken)]
        return column(tables_of(numbered)[0], "step ms")["dpsgd"]

    assert step(1.0, 1.05, 1.09) == "1050.0"
    assert step(1.0, 1.05, 1.2) == "1000.0–1200.0"


def test_trainers_come_in_order_with_the_baseline_first() -> None:
    step = tables_of(reversed(every_figure()))[0]
    assert [line[0] for line in step.cells] == list(FIGURES)


def test_metric_that_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    step = tables_of(
        rows("standard", dram(5 * GB)),
        rows("dpsgd", {"step_time_seconds": 0.5}),
    )[0]
    assert step.cells == [
        ["standard", "1.00", *"-" * 3, "5.00", *"-" * 3],
        ["dpsgd", *"-" * 5, "500.0", *"-" * 2],
    ]


def test_a_part_of_a_sum_is_shown_where_the_sum_is_not_there() -> None:
    step = tables_of(rows("standard", {"dram_read_bytes": 5 * GB}))[0]
    assert column(step, "DRAM read")["standard"] == "5.00"
    assert column(step, "DRAM total")["standard"] == "-"


def test_zero_that_was_measured_is_a_zero() -> None:
    step = tables_of(rows("standard", dram(0.0)))[0]
    assert float(column(step, "DRAM total")["standard"]) == 0


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ({"batch_size": 8}, "1b fp32, batch 8, sequence 1024, H200"),
        ({"attention": "dp_mha"}, "1b fp32, dp_mha, batch 16, sequence 1024, H200"),
        ({"device": ""}, "1b fp32, batch 16, sequence 1024, unknown device"),
    ],
    ids=["batch", "attention", "unknown-device"],
)
def test_what_shares_no_baseline_shares_no_table(other: dict[str, Any], title: str) -> None:
    found = tables_of(every_figure(), every_figure(**other))
    step = [
        table.title.removesuffix(": GB per step") for table in found if "GB per step" in table.title
    ]
    assert sorted(step) == sorted(["1b fp32, batch 16, sequence 1024, H200", title])


# --- notes -----------------------------------------------------------------------------------


def test_a_ratio_above_the_expected_range_is_named_and_one_below_is_not() -> None:
    said = notes(
        rows("standard", {**dram(100 * GB), "l2_served_bytes": 100 * GB}),
        rows("dpsgd", {**dram(300 * GB), "l2_served_bytes": 200 * GB}),
        rows("dpsgd_fgc", {**dram(600 * GB), "l2_served_bytes": 120 * GB}),
    )
    assert said == "DRAM: above 5 × standard, the limit of --expect: dpsgd_fgc 6.00."


def test_standard_training_alone_has_no_expectation() -> None:
    assert notes(rows("standard", dram(100 * GB))) == ""


def test_missing_baseline_is_said() -> None:
    said = notes(rows("dpsgd", dram(300 * GB)))
    assert said == "No ratio: the 'standard' trainer was not measured for this case."


def test_tiny_size_comes_with_a_warning() -> None:
    said = notes(rows("standard", dram(0.05 * GB)), rows("dpsgd", dram(0.2 * GB)))
    assert "WARNING: at this size much of the data stays in the L2 cache" in said


def test_real_size_comes_without_a_warning() -> None:
    assert "WARNING" not in notes(every_figure())
    assert "WARNING" not in notes(rows("standard", {"step_time_seconds": 0.1}))


# --- phases ----------------------------------------------------------------------------------


def test_phase_table_has_bytes_and_the_ratio_to_the_same_phase() -> None:
    phase = tables_of(
        by_phase("standard", forward=100, backward=200, optimizer=20),
        by_phase("dpsgd", forward=110, backward=500, clip=150, noise=40, optimizer=20),
    )[1]
    assert phase.title.endswith("DRAM GB by phase (÷ standard)")
    assert phase.headers == ["trainer", "forward", "backward", "clip", "noise", "optimizer"]
    assert phase.cells == [
        ["standard", "100.0 (1.00)", "200.0 (1.00)", "-", "-", "20.0 (1.00)"],
        ["dpsgd", "110.0 (1.10)", "500.0 (2.50)", "150.0", "40.0", "20.0 (1.00)"],
    ]


def test_phase_that_moves_next_to_nothing_has_no_column_and_is_named() -> None:
    phase = tables_of(by_phase("standard", forward=100, backward=100, outside=0.01))[1]
    assert phase.headers == ["trainer", "forward", "backward"]
    assert phase.notes == ("Below 0.1% and not shown: outside.",)
    assert tables_of(by_phase("standard", forward=100, backward=100))[1].notes == ()


def test_what_happens_outside_every_phase_is_shown_when_it_counts() -> None:
    phase = tables_of(by_phase("standard", outside=10, forward=100))[1]
    assert phase.headers == ["trainer", "forward", "outside"]


def test_no_phase_table_without_counted_phases() -> None:
    titles = [table.title for table in tables_of(rows("standard", {"step_time_seconds": 1.0}))]
    assert not any("by phase" in title for title in titles)


# --- throughput and other counters -----------------------------------------------------------


def throughput(found: list[Table]) -> list[Table]:
    return [table for table in found if "GB/s" in table.title]


def test_throughput_is_by_case_and_says_where_it_comes_from() -> None:
    [table] = throughput(
        tables_of(
            rows("standard", {**dram(400 * GB), "step_time_seconds": 0.5}),
            rows("dpsgd", {**dram(800 * GB), "step_time_seconds": 0.5}),
        )
    )
    assert "unprofiled" in "".join([table.title, *table.notes])
    assert [header[:4] for header in table.headers[1:]] == ["DRAM"] * 3
    assert [line[0].split()[0] for line in table.cells] == ["standard", "dpsgd"]
    assert [line[1:] for line in table.cells] == [
        ["200.0", "600.0", "800.0"],
        ["400.0", "1200.0", "1600.0"],
    ]


def test_no_throughput_without_times() -> None:
    assert throughput(tables_of(rows("standard", dram(400 * GB)))) == []


def test_counter_asked_for_by_its_own_name_is_shown_as_the_tool_gives_it() -> None:
    [table] = tables_of(rows("dpsgd", {"lts__t_sectors.sum": 1234567.0}))
    assert table.title == "Other counters, per step"
    assert table.cells == [
        ["dpsgd-bs16-seq1024-1b-fp32", "lts__t_sectors.sum", "1.23457e+06 sector"]
    ]


def test_steps_at_lowered_clocks_are_told_but_not_the_power_cap() -> None:
    run = timed_run(1.2e9, 0x20, 0x4, 0x20 | 0x2)
    [line] = [note for note in tables(run.summary)[0].notes if "clocks" in note]
    assert line == (
        "WARNING: clocks were lowered: fused by thermal slowdown in 2 of 3 steps, "
        "clock setting in 1 of 3 steps."
    )
    assert "clocks" not in "".join(tables(timed_run(1.9e9, 0x4).summary)[0].notes)


def test_script_has_a_table_of_times_by_phase_and_its_place_alone_as_title() -> None:
    record = {
        "device": "cpu",
        "torch": "2.13",
        "phase_seconds": [{"forward": 0.001, "backward": 0.003, "outside": 0.0005}],
        "peak_memory_bytes": None,
    }
    listed = tables(summary(to_frame(timing_rows(Script("private"), record))))
    step = listed[0]
    assert step.title == "cpu: per step"
    assert step.headers == ["trainer", "step\nms"]  # no bytes were counted
    times = next(table for table in listed if "by phase" in table.title)
    assert times.title == "cpu: ms by phase"
    assert times.headers == ["trainer", "forward", "backward", "outside"]
    assert times.cells == [["private", "1.0", "3.0", "0.5"]]
