"""Which cases share a table, what it is called, and in which order they come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.settings import Settings
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import summary, to_frame
from dpbench.show.tables import groups, tables
from dpbench.show.view import TableOptions

GB = 1e9


def case(trainer: str, total: float, *, phase: str = STEP, **fields: Any) -> list[Measurement]:
    """DRAM bytes of a case, in GB."""
    device = fields.pop("device", "H200")
    chosen = Case(trainer, **{"batch_size": 8, "seq_len": 256, **fields})
    return [
        Measurement(chosen, "ncu", phase, metric, total * GB / 2, "B", 0, device, "ncu 1")
        for metric in ("dram_read_bytes", "dram_write_bytes")
    ]


GRID = [
    *case("dpsgd", 300, batch_size=16),
    *case("standard", 100, batch_size=16),
    *case("dpsgd", 400),
    *case("standard", 50),
    *case("dpsgd", 250, phase="backward"),
    *case("standard", 30, phase="backward"),
    *case("dpsgd", 90, phase="clip"),
]


def grouped(rows: list[Measurement], **view: str) -> dict[str, list[str]]:
    """Titles, and the labels below them."""
    found = groups(summary(to_frame(rows)), TableOptions.of(Settings(**view)))
    return {group.title: list(group.shown.label.unique()) for group in found}


def test_cell_is_what_shares_a_baseline() -> None:
    assert grouped(GRID) == {
        "1b fp32, batch 8, sequence 256, H200": ["standard", "dpsgd"],
        "1b fp32, batch 16, sequence 256, H200": ["standard", "dpsgd"],
    }


def test_group_by_an_axis_labels_rows_with_the_others() -> None:
    assert grouped(GRID, group_by="trainer") == {
        "standard, 1b fp32, H200": ["bs8 seq256", "bs16 seq256"],
        "dpsgd, 1b fp32, H200": ["bs8 seq256", "bs16 seq256"],
    }
    assert list(grouped(GRID, group_by="batch_size")) == [
        "1b fp32, batch 8, H200",
        "1b fp32, batch 16, H200",
    ]


def test_group_by_phase_has_the_phases_in_order_and_the_step_last() -> None:
    assert grouped(GRID, group_by="phase") == {
        "1b fp32, phase backward, H200": ["standard bs8 seq256", "dpsgd bs8 seq256"],
        "1b fp32, phase clip, H200": ["dpsgd bs8 seq256"],
        "1b fp32, phase step, H200": [
            *("standard bs8 seq256", "dpsgd bs8 seq256"),
            *("standard bs16 seq256", "dpsgd bs16 seq256"),
        ],
    }


@pytest.mark.parametrize("label", ["cell", "phase"])
def test_devices_never_share_a_table(label: str) -> None:
    rows = [*case("dpsgd", 10), *case("dpsgd", 10, device="logical (no hardware)")]
    titles = list(grouped(rows, group_by=label))
    assert len(titles) == 2
    assert [title.rpartition(", ")[2] for title in titles] == ["H200", "logical (no hardware)"]


def test_axes_that_differ_are_in_the_label_and_the_others_in_the_title() -> None:
    rows = [*case("dpsgd", 10), *case("dpsgd", 10, precision="bf16")]
    assert grouped(rows, group_by="device") == {
        "1b, H200": ["dpsgd bs8 seq256 bf16", "dpsgd bs8 seq256 fp32"]
    }
    attentive = [*case("dpsgd", 10, attention="dp_mha")]
    assert list(grouped(attentive, group_by="device")) == ["1b fp32, dp_mha, H200"]


@pytest.mark.parametrize(
    ("sort", "labels"),
    [
        ("dram_bytes", ["standard bs8", "standard bs16", "dpsgd bs16", "dpsgd bs8"]),
        ("batch_size", ["standard bs8", "dpsgd bs8", "standard bs16", "dpsgd bs16"]),
        (None, ["standard bs8", "dpsgd bs8", "standard bs16", "dpsgd bs16"]),
    ],
)
def test_rows_are_sorted_within_a_table(sort: str | None, labels: list[str]) -> None:
    view = {"group_by": "seq_len"} | ({"sort": sort} if sort else {})
    assert list(grouped(GRID, **view).values()) == [labels]


def test_phases_are_sorted_by_their_own_numbers() -> None:
    rows = [*GRID, *case("dpsgd_fgc", 20, phase="backward")]
    backward = grouped(rows, group_by="phase", sort="dram_bytes")["1b fp32, phase backward, H200"]
    assert [label.split()[0] for label in backward] == ["dpsgd_fgc", "standard", "dpsgd"]


@pytest.mark.parametrize(("group_by", "differ"), [("cell", False), ("device", True)])
def test_labels_are_those_of_the_rows_of_a_table(group_by: str, differ: bool) -> None:
    drawn = {"none": "rank 0", "ddp": "each rank"}
    outcomes = [
        Outcome(rows[0].case, tuple(rows), labels={"noise": drawn[parallel]})
        for parallel in drawn
        for rows in [case("dpsgd", 9, parallel=parallel, gpus=1 + (parallel == "ddp"), device="x")]
    ]
    rows = [
        replace(row, rank=rank)
        for outcome in outcomes
        for row in outcome.rows
        for rank in range(row.case.gpus)
    ]
    made = tables(summary(to_frame(rows)), TableOptions.of(Settings(group_by=group_by)), outcomes)
    notes = [note for table in made for note in table.notes if note.startswith("Only dpsgd")]
    assert notes == ["Only dpsgd bs8 seq256 ddp gpus=2: noise each rank."] * differ
