"""What the charts of the HTML report show, before anything is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.results.frame import with_logical
from dpbench.results.rows import STEP, Measurement
from dpbench.show.html import data, page
from dpbench.show.html.data import Source, cases_without_logical, labelled, summary_of
from dpbench.show.html.figures import Material

ROOT = Path(__file__).parents[3]
GRID1 = json.loads((ROOT / "docs/results/h200-grid1.json").read_text())
COUNTED = json.loads((ROOT / "tests/data/logical-1b-bs8-seq256.json").read_text())


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
    place = {"instrument": "logical", "device": "logical (no hardware)", **fields}
    return [
        row(trainer, "logical_read_bytes", total / 2, **place),
        row(trainer, "logical_write_bytes", total / 2, **place),
    ]


def sources(**runs: list[dict[str, Any]]) -> list[Source]:
    return labelled((label, {"schema": 1, "rows": rows}) for label, rows in runs.items())


def test_phases_come_in_order_and_with_their_step() -> None:
    wide = data.by_phase(summary_of(labelled([("grid1", GRID1)])), data.DRAM)
    assert data.phases_of(wide) == ["forward", "backward", "clip", "noise", "optimizer"]
    assert len(wide) == 16
    parts = wide[data.phases_of(wide)].sum(axis=1)
    assert (abs(parts / wide.step - 1) < 1e-3).all()
    cell = wide[(wide.trainer == "dpsgd") & (wide.batch_size == 8) & (wide.seq_len == 256)]
    assert cell.ratio.item() == pytest.approx(4.52, abs=0.005)


def test_baseline_comes_first_in_each_cell() -> None:
    wide = data.by_phase(summary_of(labelled([("grid1", GRID1)])), data.DRAM)
    firsts = wide.groupby(["batch_size", "seq_len"], sort=False).trainer.first()
    assert set(firsts) == {"standard"}


def test_step_without_phases_has_no_phase_columns() -> None:
    wide = data.by_phase(summary_of(sources(a=dram("standard", 4e9))), data.DRAM)
    assert data.phases_of(wide) == []
    assert wide.step.tolist() == [4e9]


def test_measured_and_counted_bytes_never_mix() -> None:
    summary = summary_of(sources(a=dram("standard", 4e9) + logical("standard", 3e9)))
    assert data.basis_of(summary) == data.DRAM
    assert data.step_bytes(summary, data.DRAM).value.tolist() == [4e9]
    assert data.step_bytes(summary, data.LOGICAL).value.tolist() == [3e9]


def test_counted_bytes_are_shown_where_nothing_was_measured() -> None:
    assert data.basis_of(summary_of(sources(a=logical("standard", 3e9)))) == data.LOGICAL
    assert data.basis_of(summary_of(sources(a=[]))) is None


def test_ratio_needs_a_baseline_in_the_same_run() -> None:
    found = data.ratios(
        summary_of(sources(a=dram("standard", 2e9) + dram("dpsgd", 6e9), b=dram("dpsgd", 8e9))),
        data.DRAM,
    )
    assert found[["run", "ratio"]].values.tolist() == [["a", 3.0]]


def test_ratio_to_nothing_is_left_out() -> None:
    summary = summary_of(sources(a=dram("standard", 0) + dram("dpsgd", 6e9)))
    assert data.ratios(summary, data.DRAM).empty


def test_series_needs_two_points() -> None:
    rows = [
        measurement
        for seq, ratio in ((256, 4), (1024, 2))
        for trainer, factor in (("standard", 1), ("dpsgd", ratio))
        for measurement in dram(trainer, factor * 1e9, seq_len=seq)
    ]
    found = data.ratios(summary_of(sources(a=rows)), data.DRAM)
    [(title, batch, points)] = data.series(found, "seq_len")
    assert (title, batch, points.ratio.tolist()) == ("1b fp32", 8, [4.0, 2.0])
    assert list(data.series(found, "batch_size")) == []


def test_peak_memory_joins_the_bytes_of_the_same_premise() -> None:
    peak = {"instrument": "timing"}
    place = {"instrument": "logical", "device": "logical (no hardware)"}
    summary = summary_of(
        sources(
            a=[
                *dram("standard", 4e9),
                row("standard", "peak_memory_bytes", 7e9, **peak),
                *logical("standard", 3e9),
                row("standard", "peak_memory_bytes", 6e9, **place),
            ]
        )
    )
    assert data.memory_against_bytes(summary, data.DRAM).peak.tolist() == [7e9]
    assert data.memory_against_bytes(summary, data.LOGICAL).peak.tolist() == [6e9]


def test_logical_counts_of_another_run_stand_beside_measured_bytes() -> None:
    summary = summary_of(labelled([("measured", GRID1), ("counted", COUNTED)]))
    found = data.measured_against_logical(summary)
    assert found.trainer.tolist() == ["standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc"]
    printed = with_logical(summary[summary.phase == STEP]).dropna(subset="over_logical")
    printed = printed[printed.metric == "dram_bytes"].set_index("trainer").over_logical
    assert found.set_index("trainer").over_logical.to_dict() == printed.to_dict()
    assert found.over_logical.between(0.94, 1.11).all()


def test_nothing_counted_has_no_ratio() -> None:
    summary = summary_of(sources(a=dram("standard", 1e9) + logical("standard", 0)))
    assert data.measured_against_logical(summary).over_logical.isna().all()


def test_cases_without_counts_are_named_once() -> None:
    runs = labelled([("a", GRID1), ("b", GRID1), ("counted", COUNTED)])
    cases = cases_without_logical(runs)
    assert len(cases) == len(set(cases)) == 12
    assert Case("dpsgd", 8, 256) not in cases


def test_case_in_two_runs_is_told_apart_by_the_run() -> None:
    before, after = dram("standard", 2e9), dram("standard", 3e9)
    summary = summary_of(sources(before=before, after=after))
    assert data.step_bytes(summary, data.DRAM).title.tolist() == [
        "1b fp32, before",
        "1b fp32, after",
    ]
    apart = summary_of(sources(before=before, after=dram("standard", 3e9, precision="bf16")))
    assert data.step_bytes(apart, data.DRAM).title.tolist() == ["1b fp32", "1b bf16"]


def test_same_label_twice_is_numbered() -> None:
    found = labelled([("run", GRID1), ("run", GRID1)])
    assert [source.label for source in found] == ["run", "run (2)"]


def test_failed_case_has_its_error_among_the_cases() -> None:
    case = {k: v for k, v in row("dpsgd", "x", 1).items() if k in GRID1["cases"][0]}
    document = {
        "rows": dram("standard", 2e9),
        "cases": [
            {**case, "trainer": "standard", "error": None, "message": ""},
            {**case, "error": "CaseOutOfMemory", "message": "61 GiB"},
        ],
    }
    runs = labelled([("run", document)])
    material = Material.of(runs)
    assert material.failed[["trainer", "error", "title"]].values.tolist() == [
        ["dpsgd", "CaseOutOfMemory", "1b fp32"]
    ]
    table = page.cases(material)
    by_header = [dict(zip(table.headers, line, strict=True)) for line in table.rows]
    assert [line["error"].text for line in by_header] == ["-", "CaseOutOfMemory"]
    assert [line["DRAM total, GB"].text for line in by_header] == ["2.00", "-"]
    assert page.headline(material)[1:] == ["1 case failed."]
    counts = page.trainers(material)
    assert [[cell.text for cell in line[:3]] for line in counts.rows] == [
        ["standard", "1", "0"],
        ["dpsgd", "1", "1"],
    ]


@pytest.mark.filterwarnings("error")
def test_a_run_in_which_everything_failed_was_on_no_device() -> None:
    case = {k: v for k, v in row("dpsgd", "x", 1).items() if k in GRID1["cases"][0]}
    runs = labelled([("run", {"rows": [], "cases": [{**case, "error": "CaseTimedOut"}]})])
    assert Material.of(runs).failed.device.tolist() == [""]


def test_environment_is_one_column_per_run() -> None:
    table = page.environments(labelled([("grid1", GRID1), ("counted", COUNTED)]))
    found = {line[0].text: [cell.text for cell in line[1:]] for line in table.rows}
    assert found["gpu name"][0] == "NVIDIA H200"
    assert found["gpu memory"][0] == "150.8 GB"
    assert found["versions torch"] == ["2.11.0", COUNTED["environment"]["versions"]["torch"]]
    assert "counted without hardware" in found["rows of logical"][1]


def test_every_row_is_there_and_exact() -> None:
    table = page.every_row(labelled([("grid1", GRID1)]))
    place = table.headers.index("value")
    assert [line[place].value for line in table.rows] == [r["value"] for r in GRID1["rows"]]
    assert "trainer" in table.headers
    assert "precision fp32" in table.caption  # the same in all rows: said once


def test_no_rows_at_all_make_empty_frames() -> None:
    summary = summary_of(sources(a=[]))
    assert data.by_phase(summary, data.DRAM).empty
    assert data.by_case(summary).empty
    assert data.measured_against_logical(summary).empty


def test_what_was_written_into_a_run_later_stands_beside_its_own_environment() -> None:
    update = {
        "started": "2026-02-03",
        "cases": {"dpsgd-bs8": ["ncu"]},
        "environment": {"gpu": None},
    }
    document = {
        "rows": dram("dpsgd", 1.0),
        "environment": {"python": "3.12.3"},
        "updates": [{**update, "environment": {"python": "3.13.0"}}],
    }
    lines = page.environments(labelled([("reference", document)])).rows
    said = {line[0].text: line[1].text for line in lines}
    assert said["python"] == "3.12.3"
    assert said["update 1 cases"] == "dpsgd-bs8"
    assert said["update 1 python"] == "3.13.0"
