"""The tables that people read, in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.results.frame import to_frame
from dpbench.results.layout import Table, as_text
from dpbench.results.rows import STEP, Measurement
from dpbench.results.tables import tables
from dpbench.results.view import View

GB = 1e9
UNITS = {"bytes": "B", "seconds": "s", "second": "1/s"}
TIMING = ("step_time_seconds", "samples_per_second", "peak_memory_bytes")

FIGURES: dict[str, dict[str, float]] = {
    # As large as they get at 1b on an H200: batch 16, sequence 1024.
    "standard": {
        "dram_read_bytes": 512.3 * GB,
        "dram_write_bytes": 377.4 * GB,
        "l2_total_bytes": 5120.7 * GB,
        "peak_memory_bytes": 71.9 * GB,
        "step_time_seconds": 2.8017,
    },
    "dpsgd": {
        "dram_read_bytes": 1311.2 * GB,
        "dram_write_bytes": 956.4 * GB,
        "l2_total_bytes": 10240.1 * GB,
        "peak_memory_bytes": 138.2 * GB,
        "step_time_seconds": 5.5942,
    },
    "dpsgd_ghost": {
        "dram_read_bytes": 911.2 * GB,
        "dram_write_bytes": 756.4 * GB,
        "l2_total_bytes": 9120.1 * GB,
        "peak_memory_bytes": 88.2 * GB,
        "step_time_seconds": 4.1942,
    },
    "dpsgd_fgc": {
        "dram_read_bytes": 1111.2 * GB,
        "dram_write_bytes": 856.4 * GB,
        "l2_total_bytes": 9820.1 * GB,
        "peak_memory_bytes": 101.2 * GB,
        "step_time_seconds": 5.1942,
    },
}


def rows(
    trainer: str, metrics: dict[str, float], *, phase: str = STEP, device: str = "H200", **case: Any
) -> list[Measurement]:
    """Measurements of one step of one case."""
    return [
        Measurement(
            Case(trainer, **{"batch_size": 16, "seq_len": 1024, **case}),
            "timing" if metric in TIMING else "ncu",
            phase,
            metric,
            value,
            UNITS.get(metric.rpartition("_")[2], "sector"),
            0,
            device,
            "tool 1",
        )
        for metric, value in metrics.items()
    ]


def dram(total: float) -> dict[str, float]:
    return {"dram_read_bytes": total / 4, "dram_write_bytes": 3 * total / 4}


def tables_of(*measurements: Iterable[Measurement]) -> list[Table]:
    return tables(to_frame(row for group in measurements for row in group))


def every_figure(**case: Any) -> list[Measurement]:
    return [row for name, metrics in FIGURES.items() for row in rows(name, metrics, **case)]


def column(table: Table, header: str) -> dict[str, str]:
    """The cells of a column, by trainer."""
    [index] = [i for i, h in enumerate(table.headers) if h.replace("\n", " ") == header]
    return {line[0]: line[index] for line in table.cells}


# --- the step --------------------------------------------------------------------------------


def test_step_table_has_gigabytes_ratios_and_milliseconds() -> None:
    step = tables_of(every_figure())[0]
    assert step.title == "1b fp32, batch 16, sequence 1024, H200: GB per step"
    headers = [header.replace("\n", " ") for header in step.headers]
    assert headers[:7] == [
        *("trainer", "DRAM read", "DRAM write", "DRAM total", "DRAM ÷ std"),
        *("L2 total", "L2 ÷ std"),
    ]
    assert headers[7].startswith("peak mem")
    assert headers[8:] == ["step ms"]
    assert step.cells[:2] == [
        ["standard", "512.3", "377.4", "889.7", "1.00", "5120.7", "1.00", "71.9", "2801.7"],
        ["dpsgd", "1311.2", "956.4", "2267.6", "2.55", "10240.1", "2.00", "138.2", "5594.2"],
    ]


def test_trainers_come_in_order_with_the_baseline_first() -> None:
    step = tables_of(reversed(every_figure()))[0]
    assert [line[0] for line in step.cells] == list(FIGURES)


def test_step_table_fits_a_terminal() -> None:
    measurements = every_figure(device="NVIDIA H200")
    step = tables_of(measurements)[0]
    assert len(step.cells) == 4
    assert max(map(len, step.as_text().splitlines())) <= 80


def test_trainer_outside_expectations_is_said_within_a_terminal() -> None:
    measurements = [
        row
        for name, factor in (("standard", 1), ("dpsgd", 11), ("dpsgd_ghost", 12), ("dpsgd_fgc", 13))
        for row in rows(name, {**dram(factor * 100 * GB), "l2_total_bytes": factor * 200 * GB})
    ]
    assert max(map(len, tables_of(measurements)[0].as_text().splitlines())) <= 80


def test_metric_that_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    step = tables_of(
        rows("standard", {"dram_read_bytes": 5 * GB}),
        rows("dpsgd", {"step_time_seconds": 0.5}),
    )[0]
    assert step.cells == [
        ["standard", "5.00", *"-" * 7],
        ["dpsgd", *"-" * 7, "500.0"],
    ]


def test_zero_that_was_measured_is_a_zero() -> None:
    step = tables_of(rows("standard", {"dram_read_bytes": 0.0}))[0]
    assert float(column(step, "DRAM read")["standard"]) == 0


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ({"batch_size": 8}, "1b fp32, batch 8, sequence 1024, H200"),
        ({"seq_len": 256}, "1b fp32, batch 16, sequence 256, H200"),
        ({"precision": "bf16"}, "1b bf16, batch 16, sequence 1024, H200"),
        ({"model_size": "small"}, "small fp32, batch 16, sequence 1024, H200"),
        ({"attention": "dp_mha"}, "1b fp32, dp_mha, batch 16, sequence 1024, H200"),
        ({"device": "A100"}, "1b fp32, batch 16, sequence 1024, A100"),
        ({"device": ""}, "1b fp32, batch 16, sequence 1024, unknown device"),
    ],
    ids=["batch", "sequence", "precision", "size", "attention", "device", "unknown-device"],
)
def test_what_shares_no_baseline_shares_no_table(other: dict[str, Any], title: str) -> None:
    found = tables_of(every_figure(), every_figure(**other))
    step = [
        table.title.removesuffix(": GB per step") for table in found if "GB per step" in table.title
    ]
    assert sorted(step) == sorted(["1b fp32, batch 16, sequence 1024, H200", title])


def test_nothing_measured_makes_no_table() -> None:
    assert tables(to_frame([])) == []


# --- notes -----------------------------------------------------------------------------------


def notes(*measurements: Iterable[Measurement]) -> str:
    return "\n".join(tables_of(*measurements)[0].notes)


def test_expected_ranges_stand_beside_the_ratios() -> None:
    said = notes(
        rows("standard", {**dram(100 * GB), "l2_total_bytes": 100 * GB}),
        rows("dpsgd", {**dram(300 * GB), "l2_total_bytes": 200 * GB}),
        rows("dpsgd_fgc", {**dram(600 * GB), "l2_total_bytes": 120 * GB}),
    )
    assert said == (
        "DRAM expected 2 to 5 x standard; outside: dpsgd_fgc 6.00.\n"
        "L2 expected 1.5 to 3 x standard; outside: dpsgd_fgc 1.20."
    )


@pytest.mark.parametrize("ratio", [2.0, 3.3, 5.0])
def test_ratio_within_the_expected_range_is_not_called_outside(ratio: float) -> None:
    said = notes(rows("standard", dram(100 * GB)), rows("dpsgd", dram(ratio * 100 * GB)))
    assert said == "DRAM expected 2 to 5 x standard; outside: none."


def test_standard_training_alone_has_no_expectation() -> None:
    assert notes(rows("standard", dram(100 * GB))) == ""


def test_missing_baseline_is_said() -> None:
    said = notes(rows("dpsgd", dram(300 * GB)))
    assert said == "No ratio: the 'standard' trainer was not measured for this cell."


def test_baseline_of_another_cell_is_missing_all_the_same() -> None:
    found = tables_of(rows("standard", dram(GB * 300)), rows("dpsgd", dram(GB * 300), batch_size=8))
    without = [table for table in found if "No ratio" in "".join(table.notes)]
    assert [table.title.split(",")[1] for table in without] == [" batch 8"] * len(without)
    assert without != []


def test_tiny_size_comes_with_a_warning() -> None:
    said = notes(rows("standard", dram(0.05 * GB)), rows("dpsgd", dram(0.2 * GB)))
    assert "WARNING: at this size the data stays in the L2 cache" in said


def test_real_size_comes_without_a_warning() -> None:
    assert "WARNING" not in notes(every_figure())
    assert "WARNING" not in notes(rows("standard", {"step_time_seconds": 0.1}))


# --- phases ----------------------------------------------------------------------------------


def by_phase(trainer: str, **phases: float) -> list[Measurement]:
    """DRAM bytes in GB by phase, and for the step."""
    return [
        *(
            r
            for phase, total in phases.items()
            for r in rows(trainer, dram(total * GB), phase=phase)
        ),
        *rows(trainer, dram(sum(phases.values()) * GB)),
    ]


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


def test_phase_that_moves_next_to_nothing_has_no_column() -> None:
    phase = tables_of(by_phase("standard", forward=100, backward=100, outside=0.01))[1]
    assert phase.headers == ["trainer", "forward", "backward"]


def test_what_happens_outside_every_phase_is_shown_when_it_counts() -> None:
    phase = tables_of(by_phase("standard", outside=10, forward=100))[1]
    assert phase.headers == ["trainer", "forward", "outside"]


def test_no_phase_table_without_counted_phases() -> None:
    titles = [table.title for table in tables_of(rows("standard", {"step_time_seconds": 1.0}))]
    assert not any("by phase" in title for title in titles)


def test_phase_table_fits_a_terminal() -> None:
    bare = {"forward": 111.1, "backward": 333.3, "optimizer": 88.8}
    private = {"forward": 111.1, "backward": 1522.2, "clip": 311.1, "noise": 211.1} | {
        "optimizer": 88.8
    }
    phase = tables_of(
        by_phase("standard", **bare), *(by_phase(name, **private) for name in [*FIGURES][1:])
    )[1]
    assert len(phase.cells) == 4
    assert max(map(len, phase.as_text().splitlines())) <= 80


def test_no_phase_table_when_only_the_step_was_counted() -> None:
    titles = [table.title for table in tables_of(rows("standard", dram(100 * GB)))]
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


@pytest.mark.parametrize(
    "other",
    [{"precision": "bf16"}, {"model_size": "medium"}, {"device": "A100"}],
    ids=lambda value: next(iter(value)),
)
def test_throughputs_of_different_configurations_can_be_told_apart(other: dict[str, Any]) -> None:
    figures = {**dram(400 * GB), "step_time_seconds": 0.5}
    found = tables_of(rows("standard", figures), rows("standard", figures, **other))
    cells = [(table.title, line[0]) for table in throughput(found) for line in table.cells]
    assert len(set(cells)) == 2


def test_throughput_table_fits_a_terminal() -> None:
    metrics = ("l2_read_bytes", "l2_write_bytes", "global_load_bytes", "global_store_bytes")
    extra = dict.fromkeys(metrics, 5120.7 * GB)
    [table] = throughput(tables_of(every_figure(), *(rows(name, extra) for name in FIGURES)))
    assert len(table.headers) == 8
    assert max(map(len, table.as_text().splitlines())) <= 80


def test_counter_asked_for_by_its_own_name_is_shown_as_the_tool_gives_it() -> None:
    table = tables_of(rows("dpsgd", {"lts__t_sectors.sum": 1234567.0}))[-1]
    assert table.title == "Other counters, per step"
    assert table.cells == [["dpsgd bs16 seq1024", "lts__t_sectors.sum", "1.23457e+06 sector"]]


# --- what was asked for ----------------------------------------------------------------------


def viewed(measurements: Iterable[Measurement], **view: str) -> list[Table]:
    return tables(to_frame(measurements), View.of(**view))


def test_chosen_columns_are_the_only_table_of_a_cell() -> None:
    measurements = [*by_phase("standard", forward=100), *by_phase("dpsgd", forward=150)]
    [table] = viewed(measurements, columns="dram_ratio,dram_bytes,peak_memory_bytes")
    assert table.title == "1b fp32, batch 16, sequence 1024, H200: GB per step"
    assert table.headers == ["trainer", "DRAM\n÷ std", "DRAM\ntotal", "peak\nmem."]
    assert table.cells == [["standard", "1.00", "100.0", "-"], ["dpsgd", "1.50", "150.0", "-"]]


def test_title_speaks_of_gigabytes_only_where_there_are_some() -> None:
    [table] = viewed(every_figure(), columns="dram_ratio,step_time_seconds")
    assert table.title.endswith("H200: per step")
    assert table.cells[0] == ["standard", "1.00", "2801.7"]


def test_group_without_any_chosen_column_has_no_table() -> None:
    logical = rows("standard", {"peak_memory_bytes": GB}, device="logical (no hardware)")
    [table] = viewed([*every_figure(), *logical], columns="dram_bytes")
    assert "H200" in table.title


def test_counter_can_be_a_column() -> None:
    [table] = viewed(rows("dpsgd", {"lts__t_sectors.sum": 5.0}), columns="lts__t_sectors.sum")
    assert table.cells == [["dpsgd", "5 sector"]]


def test_throughputs_and_rates_can_be_columns() -> None:
    figures = {**dram(400 * GB), "step_time_seconds": 0.5, "samples_per_second": 32.0}
    [table] = viewed(rows("dpsgd", figures), columns="dram_throughput,samples_per_second")
    assert table.headers[1:] == ["DRAM total\nGB/s", "samples\nper s"]
    assert table.cells == [["dpsgd", "800.0", "32.0"]]


@pytest.mark.parametrize("group_by", ["cell", "device", "trainer", "seq_len,trainer"])
def test_tables_of_every_grouping_fit_a_terminal(group_by: str) -> None:
    found = viewed([*every_figure(), *every_figure(precision="bf16")], group_by=group_by)
    assert max(map(len, as_text(found).splitlines())) <= 80
    assert "138.2" in as_text(found)  # nothing was lost


def test_by_phase_there_is_one_table_a_phase_without_what_only_steps_have() -> None:
    measurements = [
        *by_phase("standard", forward=100, backward=200),
        *by_phase("dpsgd", forward=100, backward=500, clip=90),
        *rows("dpsgd", {"peak_memory_bytes": 80 * GB}),
    ]
    found = {table.title.split(", ")[1]: table for table in viewed(measurements, group_by="phase")}
    assert list(found) == [f"phase {name}" for name in ("forward", "backward", "clip", STEP)]
    assert found["phase backward"].headers[-2:] == ["DRAM\ntotal", "DRAM\n÷ std"]
    assert found["phase backward"].cells[1][-2:] == ["500.0", "2.50"]
    assert "peak\nmem." in found["phase step"].headers


def test_small_phase_of_a_large_step_is_no_reason_to_warn() -> None:
    found = viewed(by_phase("standard", forward=100, optimizer=0.2), group_by="phase")
    assert "WARNING" not in as_text(found)


def test_table_of_several_cells_says_which_of_them_lack_a_baseline() -> None:
    measurements = [
        *rows("standard", dram(100 * GB)),
        *rows("dpsgd", dram(300 * GB)),
        *rows("dpsgd", dram(300 * GB), batch_size=8),
    ]
    [table] = viewed(measurements, group_by="device")
    assert table.notes[0] == (
        "No ratio for dpsgd bs8 seq1024: the 'standard' trainer was not measured for their cells."
    )


# --- spread ----------------------------------------------------------------------------------


def steps(trainer: str, *totals: float) -> list[Measurement]:
    """A case whose active steps moved these many GB."""
    return [
        replace(row, repeat=repeat)
        for repeat, total in enumerate(totals)
        for row in rows(trainer, dram(total * GB))
    ]


def test_largest_spread_over_the_steps_is_said_with_its_case() -> None:
    said = notes(steps("standard", 100, 100), steps("dpsgd", 198, 202))
    assert said.splitlines()[-1] == (
        "Largest spread, (max - min) / value: DRAM total 2.00% (dpsgd, 2 steps)."
    )


def test_one_step_has_no_spread() -> None:
    assert "spread" not in notes(steps("standard", 100))
    [table] = viewed(steps("standard", 100), columns="dram_bytes,dram_spread,spread")
    assert table.cells == [["standard", "100.0", "-", "-"]]


def test_spread_can_be_a_column_and_is_not_said_twice() -> None:
    measurements = [*steps("standard", 100, 101), *steps("dpsgd", 198, 202)]
    [table] = viewed(measurements, columns="dram_spread,spread", sort="spread")
    assert table.cells == [["standard", "1.00%", "1.00%"], ["dpsgd", "2.00%", "2.00%"]]
    assert "spread" not in "".join(table.notes)


# --- measured against logical ----------------------------------------------------------------


def counted(trainer: str, total: float, **fields: Any) -> list[Measurement]:
    """Logical bytes in GB, as an instrument without hardware gives them."""
    metrics = {"logical_read_bytes": total * GB / 2, "logical_write_bytes": total * GB / 2}
    device = "logical (no hardware)"
    found = rows(trainer, metrics, device=device, **fields)
    return [replace(row, instrument="logical") for row in found]


def test_measured_over_logical_is_by_phase_and_for_the_step() -> None:
    found = tables_of(
        by_phase("standard", forward=100, backward=300),
        by_phase("dpsgd", forward=100, backward=600, clip=50),
        counted("standard", 200),
        counted("standard", 50, phase="forward"),
        counted("standard", 150, phase="backward"),
        counted("dpsgd", 500),
        counted("dpsgd", 50, phase="forward"),
        counted("dpsgd", 400, phase="backward"),
        counted("dpsgd", 50, phase="clip"),
    )
    [table] = [table for table in found if "÷ logical" in table.title]
    assert table.title == "1b fp32, batch 16, sequence 1024, H200: DRAM measured ÷ logical"
    assert table.headers == [
        *("trainer", "DRAM\nGB", "logical\nGB", "forward", "backward", "clip", STEP)
    ]
    assert table.cells == [
        ["standard", "400.0", "200.0", "2.00", "2.00", "-", "2.00"],
        ["dpsgd", "750.0", "500.0", "2.00", "1.50", "1.00", "1.50"],
    ]
    assert "counted without hardware" in table.notes[0]


def test_no_quotient_without_both_or_for_another_case() -> None:
    measured = by_phase("standard", forward=100)
    for other in ([], counted("dpsgd", 50), counted("standard", 50, precision="bf16")):
        assert "÷ logical" not in as_text(tables_of(measured, other))


def test_logical_rows_never_share_a_table_with_measured_ones() -> None:
    measurements = [*by_phase("standard", forward=100), *counted("standard", 50)]
    for label in ("cell", "device", "trainer", "phase"):
        for table in viewed(measurements, group_by=label, columns="dram_bytes,logical_bytes"):
            values = {cell for line in table.cells for cell in line[1:]}
            assert values in ({"100.0", "-"}, {"50.0", "-"})


def test_measured_over_logical_can_be_a_column_and_an_order() -> None:
    measurements = [
        *rows("standard", {**dram(300 * GB), "peak_memory_bytes": 22 * GB}),
        *rows("dpsgd", dram(400 * GB)),
        *counted("standard", 100),
        *counted("dpsgd", 200),
    ]
    columns = "dram_over_logical,dram_read_over_logical"
    [table] = viewed(measurements, columns=columns, sort="dram_over_logical")
    assert table.cells == [["dpsgd", "2.00", "1.00"], ["standard", "3.00", "1.50"]]
