"""Tables for any requested case: columns, order, groups, spread, measured over logical."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dpbench.core.settings import Settings
from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import summary, to_frame
from dpbench.show.layout import Table, as_text
from dpbench.show.tables import tables
from dpbench.show.view import TableOptions
from tests.results.figures import (
    GB,
    by_phase,
    dram,
    every_figure,
    notes,
    rows,
    tables_of,
)

# --- what was asked for ----------------------------------------------------------------------


def viewed(measurements: Iterable[Measurement], **view: str) -> list[Table]:
    return tables(summary(to_frame(measurements)), TableOptions.of(Settings(**view)))


def test_chosen_columns_are_the_only_table_of_a_cell() -> None:
    measurements = [*by_phase("standard", forward=100), *by_phase("dpsgd", forward=150)]
    [table] = viewed(measurements, columns="dram_ratio,dram_bytes,peak_memory_bytes")
    assert table.title == "1b fp32, batch 16, sequence 1024, H200: GB per step"
    assert table.headers == ["trainer", "DRAM\n÷ std", "DRAM\ntotal", "peak\nmem."]
    assert table.cells == [["standard", "1.00", "100.0", "-"], ["dpsgd", "1.50", "150.0", "-"]]


def test_group_without_any_chosen_column_has_no_table() -> None:
    logical = rows("standard", {"peak_memory_bytes": GB}, device="logical (no hardware)")
    [table] = viewed([*every_figure(), *logical], columns="dram_bytes")
    assert "H200" in table.title


def test_throughputs_and_rates_can_be_columns() -> None:
    figures = {**dram(400 * GB), "step_time_seconds": 0.5, "samples_per_second": 32.0}
    [table] = viewed(rows("dpsgd", figures), columns="dram_throughput,samples_per_second")
    assert table.headers[1:] == ["DRAM total\nGB/s", "samples\nper s"]
    assert table.cells == [["dpsgd", "800.0", "32.0"]]


def test_tables_fit_a_terminal() -> None:
    found = viewed([*every_figure(), *every_figure(precision="bf16")], group_by="device")
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
        "No ratio for dpsgd bs8 seq1024: the 'standard' trainer was not measured for these cases."
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
