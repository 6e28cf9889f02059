"""What the charts of the HTML report show, before anything is drawn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import AXES, Case
from dpbench.core.subject import Script
from dpbench.results.rows import Measurement
from dpbench.results.run import Run
from dpbench.show.html import charts, data, page
from dpbench.show.html.data import PageData, labelled
from dpbench.show.html.figures import Chart
from dpbench.show.layout import Table

ROOT = Path(__file__).parents[3]
GRID1: Any = Run.load(ROOT / "tests/data/saved/grid1.json").document
COUNTED: Any = Run.load(ROOT / "tests/data/logical-1b-bs8-seq256.json").document


NOWHERE = "logical (no hardware)"


def row(trainer: str, metric: str, value: float, **fields: Any) -> dict[str, Any]:
    """A row of one step on an H200, unless said otherwise."""
    case = {"batch_size": 8, "seq_len": 256} | {
        k: fields.pop(k) for k in ("batch_size", "seq_len", "precision") if k in fields
    }
    known = {"instrument": "ncu", "phase": "step", "unit": "B", "device": "NVIDIA H200"} | fields
    return Measurement(
        case=Case(trainer, **case), metric=metric, value=value, repeat=0, tool="t", **known
    ).as_row()


def dram(trainer: str, total: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        row(trainer, "dram_read_bytes", total / 2, **fields),
        row(trainer, "dram_write_bytes", total / 2, **fields),
    ]


def logical(trainer: str, total: float, **fields: Any) -> list[dict[str, Any]]:
    place = {"instrument": "logical", "device": NOWHERE, **fields}
    return [
        row(trainer, "logical_read_bytes", total / 2, **place),
        row(trainer, "logical_write_bytes", total / 2, **place),
    ]


def material(**runs: list[dict[str, Any]]) -> PageData:
    return PageData(labelled((label, {"schema": 2, "rows": rows}) for label, rows in runs.items()))


@cache
def grid1() -> PageData:
    return PageData(labelled([("grid1", GRID1), ("counted", COUNTED)]))


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def exact(table: Table) -> list[dict[str, Any]]:
    """The values of a table, line by line, by header."""
    return [dict(zip(table.headers, line, strict=True)) for line in table.exact]


def test_phases_come_in_order_and_with_their_step() -> None:
    lines = exact(drawn(charts.bytes_by_phase(grid1())).table)
    names = ["forward", "backward", "clip", "noise", "optimizer"]
    assert list(lines[0])[4:] == [*(f"{name}, GB" for name in (*names, "step")), "÷ standard"]
    assert len(lines) == 16
    for line in lines:
        parts = [line[f"{name}, GB"] for name in names if line[f"{name}, GB"] > 0]
        assert sum(parts) == pytest.approx(line["step, GB"], rel=1e-3)
    [dpsgd] = [x for x in lines if [*x.values()][1:4] == [8, 256, "dpsgd"]]
    assert dpsgd["÷ standard"] == pytest.approx(4.52, abs=0.005)


def test_a_phase_that_no_case_of_a_cell_has_is_not_drawn_there() -> None:
    rows = [
        *dram("standard", 4e9),
        *dram("standard", 3e9, phase="forward"),
        *dram("standard", 8e9, batch_size=16),
        *dram("standard", 7e9, batch_size=16, phase="backward"),
    ]
    small, large = drawn(charts.bytes_by_phase(material(a=rows))).panels.values()
    assert [trace.get("name") for trace in small["data"]] == ["forward", None]
    assert [trace.get("name") for trace in large["data"]] == ["backward", None]


def test_measured_and_counted_bytes_never_mix() -> None:
    both = material(a=dram("standard", 4e9) + logical("standard", 3e9))
    assert both.basis == data.MEASURED
    assert both.step_bytes.value.tolist() == [4e9]


def test_counted_bytes_are_shown_where_nothing_was_measured() -> None:
    assert material(a=logical("standard", 3e9)).basis == data.COUNTED
    assert material(a=[]).basis == data.MEASURED


def test_ratio_needs_a_baseline_in_the_same_run() -> None:
    rows = dram("standard", 2e9) + dram("dpsgd", 6e9)
    found = material(a=rows, b=dram("dpsgd", 8e9)).ratios
    assert found[["run", "ratio"]].values.tolist() == [["a", 3.0]]


def test_case_in_two_runs_is_told_apart_by_the_run() -> None:
    before, after = dram("standard", 2e9), dram("standard", 3e9)
    twice = material(before=before, after=after).step_bytes
    assert twice.title.tolist() == ["1b fp32, before", "1b fp32, after"]
    apart = material(before=before, after=dram("standard", 3e9, precision="bf16"))
    assert apart.step_bytes.title.tolist() == ["1b fp32", "1b bf16"]


def test_same_label_twice_is_numbered() -> None:
    found = labelled([("run", GRID1), ("run", GRID1)])
    assert [run.name for run in found] == ["run", "run (2)"]


def measured_case(trainer: str) -> dict[str, Any]:
    """A case as a document has it."""
    fields = {k: v for k, v in row(trainer, "x", 1).items() if k in AXES}
    return {**fields, "instruments": ["ncu"], "error": None, "message": ""}


def test_failed_case_is_counted_and_named_with_its_error() -> None:
    case = measured_case("dpsgd")
    document = {
        "rows": dram("standard", 2e9),
        "cases": [
            {**case, "trainer": "standard", "error": None, "message": ""},
            {**case, "error": "CaseOutOfMemory", "message": "61 GiB"},
        ],
    }
    of = PageData(labelled([("run", document)]))
    table = page.trainers(of.runs)
    assert table.notes == ("CaseOutOfMemory: 61 GiB",)
    assert [[line[0], line[2]] for line in table.cells] == [["standard", "1/1"], ["dpsgd", "0/1"]]
    assert [line["DRAM total, GB"] for line in exact(page.steps(of))] == [2e9]
    assert page.headline(of)[1:] == ["1 case failed."]


def test_what_trainers_clip_is_said_below_their_cases() -> None:
    case = measured_case("dpsgd")
    cases = [{**case, "error": None, "message": "", "labels": {"clips": "flat"}}]
    [run] = labelled([("run", {"rows": dram("dpsgd", 2e9), "cases": cases})])
    assert page.trainers([run]).notes == ("dpsgd: clips flat.",)


def test_a_script_has_no_batch_size_but_the_one_it_was_given() -> None:
    rows = dram("train", 4e9, phase="forward") + dram("train", 5e9)
    of = material(
        a=[row | Script("train").columns for row in rows],
        b=[row | Script("train", 8).columns for row in rows],
    )
    assert [*drawn(charts.bytes_by_phase(of)).panels] == ["script", "script, batch 8"]
    assert [line[1:3] for line in page.steps(of).cells] == [["-", "train"], ["8", "train"]]


@pytest.mark.filterwarnings("error")
def test_a_run_in_which_everything_failed_was_on_no_device() -> None:
    case = measured_case("dpsgd")
    runs = labelled([("run", {"rows": [], "cases": [{**case, "error": "CaseTimedOut"}]})])
    assert PageData(runs).failed.device.tolist() == [""]


def test_environment_is_one_column_per_run() -> None:
    table = page.environments(labelled([("grid1", GRID1), ("counted", COUNTED)]))
    found = {line[0]: line[1:] for line in table.cells}
    assert found["gpu name"][0] == "NVIDIA H200"
    assert found["gpu memory"][0] == "150.8 GB"
    assert found["versions torch"] == ["2.11.0", COUNTED["environment"]["versions"]["torch"]]
    assert "counted without hardware" in found["rows of logical"][1]


def test_no_rows_at_all_make_empty_tables() -> None:
    empty = material(a=[])
    assert page.steps(empty).cells == page.trainers(empty.runs).cells == []
    assert page.draw(empty) == []
