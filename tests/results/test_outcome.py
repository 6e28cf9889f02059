"""What became of each case, and the run as one document."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import AXES, Case
from dpbench.core.files import write_text
from dpbench.core.gpu import Gpu
from dpbench.core.subject import Script
from dpbench.results.conditions import environment
from dpbench.results.kernels import OperatorCount, in_ranges, modules
from dpbench.results.outcome import (
    LISTS,
    Outcome,
    document,
    document_text,
    trainer_summary,
)
from dpbench.results.rows import NO_HARDWARE, SCHEMA, STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.schema import parsed
from dpbench.show.outputs import markdown_tables, summary_tables, trainer_table
from dpbench.show.view import TableOptions
from tests.results.figures import any_text

UNITS = {"bytes": "B", "seconds": "s"}
FIGURES = {
    "dram_read_bytes": 5e9,
    "dram_write_bytes": 3e9,
    "step_time_seconds": 0.5,
    "peak_memory_bytes": 7e9,
}


def ok(trainer: str = "dpsgd", metrics: dict[str, float] = FIGURES, **fields: Any) -> Outcome:
    """The outcome of a case that succeeded, or that failed after these measurements."""
    case = Case(trainer, batch_size=fields.pop("batch_size", 8), seq_len=256)
    rows = tuple(
        Measurement(
            case,
            "ncu" if metric.startswith("dram") else "timing",
            STEP,
            metric,
            value,
            UNITS[metric.rpartition("_")[2]],
            0,
            "H200",
            "tool 1",
        )
        for metric, value in metrics.items()
    )
    fields.setdefault("instruments", ("timing", "ncu"))
    return Outcome(case, rows, fields.pop("seconds", 1.5), **fields)


def failed(trainer: str = "dpsgd", **fields: Any) -> Outcome:
    """The outcome of a case that did not fit."""
    return ok(
        trainer,
        fields.pop("metrics", {}),
        error="CaseOutOfMemory",
        message="CUDA out of memory",
        log="ncu_reports/case.log",
        log_tail="torch.OutOfMemoryError: …",
        **fields,
    )


def counted(trainer: str = "dpsgd", **fields: Any) -> Outcome:
    """The outcome of a case that was counted without hardware."""
    case = Case(trainer, batch_size=8, seq_len=256)
    row = Measurement(
        case, "logical", STEP, "logical_read_bytes", 4e9, "B", 0, "logical (no hardware)", "torch"
    )
    clone = OperatorCount("clip", "aten.clone", 3, 10, 20, 0)
    return Outcome(case, (row,), 1.0, instruments=("logical",), operators=(clone,), **fields)


# --- one outcome -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome", [ok(), failed(), failed(metrics=FIGURES), counted(notes=("one",))]
)
def test_outcome_survives_json(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


@settings(deadline=None, max_examples=8)
@given(message=any_text(), tail=any_text(), seconds=st.floats(0, 1e6), log=st.none() | any_text())
def test_outcome_survives_json_whatever_was_said(
    message: str, tail: str, seconds: float, log: str | None
) -> None:
    outcome = Outcome(
        ok().case, (), seconds, error="CaseFailed", message=message, log=log, log_tail=tail
    )
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


# --- tables ---------------------------------------------------------------------------------


def test_nothing_run_has_no_tables() -> None:
    assert summary_tables(run([])) == []


def test_tables_end_with_the_cases_by_trainer() -> None:
    outcomes = [ok(), failed("standard", metrics=FIGURES)]
    assert summary_tables(run(outcomes))[-1] == trainer_table(trainer_summary(outcomes))


def test_counted_cases_have_a_line_of_their_own() -> None:
    outcomes = [ok("dpsgd"), counted("dpsgd"), ok("dpsgd", batch_size=16)]
    assert [(line["instruments"], line["ok"]) for line in trainer_summary(outcomes)] == [
        (["timing", "ncu"], 2),
        (["logical"], 1),
    ]
    assert [cells[1] for cells in summary_tables(run(outcomes))[-1].cells] == [
        "timing, ncu",
        "logical",
    ]


def test_what_was_assumed_is_said_below_the_tables() -> None:
    table = summary_tables(
        Run.of("run", [counted(notes=("all 64 rows were taken to be distinct",))])
    )[-1]
    assert table.notes == ("dpsgd-bs8-seq256-1b-fp32: all 64 rows were taken to be distinct.",)


def test_measured_and_counted_bytes_of_a_case_share_no_table() -> None:
    titles = [table.title for table in summary_tables(run([ok(), counted()]))]
    steps = [title.split(", ")[3] for title in titles if title.endswith("B per step")]
    assert [step.partition(":")[0] for step in steps] == ["H200", "logical (no hardware)"]


def test_tables_of_a_run_hold_all_its_cases() -> None:
    titles = [table.title for table in summary_tables(run([ok("standard"), ok(batch_size=16)]))]
    assert [t.split(", ")[1] for t in titles if "GB per step" in t] == ["batch 8", "batch 16"]


# --- the document ----------------------------------------------------------------------------


def run(outcomes: Iterable[Outcome]) -> Run:
    return Run.of("run", outcomes, {"python": "3"})


def saved(*outcomes: Outcome) -> Any:
    """The document as another program reads it; refuses what is not JSON."""
    return json.loads(json.dumps(run(outcomes).with_derived().document, allow_nan=False))


def test_document_has_every_measurement_as_a_row() -> None:
    outcomes = [ok("standard"), ok("dpsgd"), failed("dpsgd_ghost")]
    data = saved(*outcomes)
    assert data["schema"] == SCHEMA
    assert data["environment"] == {"python": "3"}
    assert data["rows"] == [row.as_row() for outcome in outcomes for row in outcome.rows]


def test_document_has_every_operator_that_was_counted_as_a_row() -> None:
    data = saved(ok(), counted())
    [row] = data["operators"]
    assert (row["trainer"], row["batch_size"], row["operator"]) == ("dpsgd", 8, "aten.clone")
    assert [case["instruments"] for case in data["cases"]] == [["timing", "ncu"], ["logical"]]


@pytest.mark.parametrize(
    "key",
    [
        *("trainer", "model_size", "batch_size", "seq_len", "precision"),
        *("instrument", "phase", "metric", "value", "unit"),
    ],
)
def test_every_row_of_the_document_has_the_fields_that_scripts_read(key: str) -> None:
    data = saved(ok("dpsgd_ghost"))
    assert all(row[key] is not None for row in data["rows"])
    assert {row["trainer"] for row in data["rows"]} == {"dpsgd_ghost"}


def test_document_says_what_became_of_each_case() -> None:
    done, broken = saved(ok("standard"), failed("dpsgd"))["cases"]
    assert {axis: done[axis] for axis in AXES} == asdict(ok("standard").case)
    assert (done["error"], done["seconds"]) == (None, 1.5)
    assert broken["trainer"] == "dpsgd"
    assert broken["error"] == "CaseOutOfMemory"
    assert broken["message"] == "CUDA out of memory"
    assert broken["log"] == "ncu_reports/case.log"


def test_document_has_the_summary_by_trainer() -> None:
    outcomes = [ok("standard"), failed("dpsgd")]
    assert saved(*outcomes)["summary"] == trainer_summary(outcomes)


def test_document_has_throughputs_with_their_source() -> None:
    rates = {rate["metric"]: rate for rate in saved(ok())["throughputs"]}
    assert {metric: rate["value"] for metric, rate in rates.items()} == {
        "dram_read_throughput": 10e9,
        "dram_write_throughput": 6e9,
        "dram_throughput": 16e9,
    }
    for rate in rates.values():
        assert (rate["trainer"], rate["batch_size"], rate["unit"]) == ("dpsgd", 8, "B/s")
        assert rate["instrument"] == "ncu bytes / timing seconds"


def test_document_has_each_ratio_to_standard_exactly() -> None:
    standard = {"dram_read_bytes": 3e9, "dram_write_bytes": 3e9, "step_time_seconds": 0.7}
    ratios = saved(ok("standard", standard), ok("dpsgd"))["ratios"]
    assert {(r["instrument"], r["phase"], r["metric"]): r["ratio"] for r in ratios} == {
        ("ncu", STEP, "dram_read_bytes"): 5 / 3,
        ("ncu", STEP, "dram_write_bytes"): 1.0,
        ("ncu", STEP, "dram_bytes"): 8 / 6,
        ("timing", STEP, "step_time_seconds"): 0.5 / 0.7,
    }
    assert {(r["trainer"], r["batch_size"], r["device"]) for r in ratios} == {("dpsgd", 8, "H200")}


def test_document_has_no_ratio_without_a_baseline() -> None:
    assert saved(ok("dpsgd"), ok("standard", batch_size=16))["ratios"] == []


def test_document_has_measured_over_logical() -> None:
    counted = [
        replace(row, instrument="logical", device=NO_HARDWARE, metric=metric, value=2e9)
        for row, metric in zip(
            ok().rows, ("logical_read_bytes", "logical_write_bytes"), strict=False
        )
    ]
    outcomes = [ok(), replace(ok(), rows=tuple(counted), instruments=("logical",))]
    found = {
        r["metric"]: (r["logical"], r["over_logical"])
        for r in saved(*outcomes)["measured_over_logical"]
    }
    assert found == {
        "dram_read_bytes": (2e9, 2.5),
        "dram_write_bytes": (2e9, 1.5),
        "dram_bytes": (4e9, 2.0),
    }


def test_a_script_of_no_case_is_measured_over_its_own_count() -> None:
    script = Script("train")
    measured = [replace(row, case=script) for row in ok().rows if row.metric == "dram_read_bytes"]
    counted = [
        replace(
            row, instrument="logical", device=NO_HARDWARE, metric="logical_read_bytes", value=2e9
        )
        for row in measured
    ]
    outcomes = [
        Outcome(script, tuple(rows), 1.0, instruments=(rows[0].instrument,))
        for rows in (measured, counted)
    ]
    [found] = saved(*outcomes)["measured_over_logical"]
    assert (found["logical"], found["over_logical"]) == (2e9, 2.5)


@pytest.mark.parametrize("outcomes", [[], [failed()]])
def test_document_of_a_run_that_measured_nothing_is_valid(outcomes: list[Outcome]) -> None:
    data = saved(*outcomes)
    assert data["rows"] == data["throughputs"] == data["ratios"] == []
    assert data["measured_over_logical"] == []
    assert len(data["cases"]) == len(outcomes)


def test_outcomes_can_be_read_back_from_the_rows_of_a_document() -> None:
    [outcome] = Run(Path("run.json"), saved(ok())).outcomes
    assert {*outcome.rows} == {*ok().rows}


# --- the machine -----------------------------------------------------------------------------


def test_environment_says_which_software_and_machine() -> None:
    gpu = Gpu("GPU-1", "NVIDIA H200", 150_000_000_000, "580.0", free_bytes=5, processes=(17,))
    data = json.loads(json.dumps(environment(gpu.identity)))
    what = {"uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 150_000_000_000}
    assert data["gpu"] == {**what, "driver": "580.0", "chip": ""}
    assert data["python"].startswith("3.")
    assert {"dpbench", "torch", "opacus", "pandas", "ncu-report"} <= set(data["versions"])
    assert data["versions"]["torch"] is not None
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert (data["machine"]["cpu"] or "") in cpus
    assert bool(data["machine"]["cpu"]) == ("model name" in cpus)


def test_environment_without_a_gpu_says_so() -> None:
    assert environment()["gpu"] is None


# --- files -----------------------------------------------------------------------------------


def test_file_is_written_with_its_directories(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "today" / "run.txt"
    write_text(path, "÷ std")
    assert path.read_text(encoding="utf-8") == "÷ std"


def test_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    for text in ("a longer first text", "second"):
        write_text(path, text)
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_that_fails_leaves_the_earlier_file_and_no_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "begins well \ud800")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_cannot_be_put_in_place_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "run.txt").mkdir()
    with pytest.raises(OSError, match=r"run\.txt"):
        write_text(tmp_path / "run.txt", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["run.txt"]


def test_json_file_holds_the_document(tmp_path: Path) -> None:
    outcomes = [ok("standard"), failed("dpsgd")]
    write_text(tmp_path / "run.json", run(outcomes).with_derived().text)
    assert parsed((tmp_path / "run.json").read_bytes()) == saved(*outcomes)


def test_markdown_holds_every_table() -> None:
    outcomes = [ok("standard"), failed("dpsgd")]
    text = markdown_tables([Run(Path("run"), document(outcomes, {}))], TableOptions())
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("#")]
    assert titles == [table.title for table in summary_tables(run(outcomes))]
    assert "CaseOutOfMemory: CUDA out of memory" in text


def test_a_heavy_operator_of_another_library_is_named_below_the_first_table() -> None:
    guessed = [
        OperatorCount("forward", name, 1, size, 0, 0, general_rule=known)
        for name, size, known in (("b.c", 30, True), ("aten.mm", 969, False), ("a.b", 1, True))
    ]
    outcome = replace(counted(), operators=tuple(guessed))
    notes = summary_tables(run([outcome]))[0].notes
    (warning,) = [note for note in notes if note.startswith("WARNING")]
    assert "3% of the logical bytes are a guess from the schema of b.c" in warning
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


NAMES = st.lists(
    st.sampled_from(["a", "b", "0", "1", "2", "9", "10", "11"]), min_size=1, max_size=4
)


@given(st.lists(NAMES.map(".".join), min_size=1))
def test_modules_in_ranges_are_the_modules(names: list[str]) -> None:
    assert [*modules(in_ranges(names))] == names


def test_layers_that_count_up_are_one_range() -> None:
    names = [f"blocks.{n}.{part}.0" for part in ("up", "down") for n in range(24)]
    assert in_ranges(names) == "blocks.0-23.up.0, blocks.0-23.down.0"
    assert in_ranges(["0.0", "0.1", "1.0", "1.1"]) == "0.0-1, 1.0-1"


SIZES = st.integers(0, 3)


@given(
    st.lists(
        st.builds(
            OperatorCount,
            st.just("clip"),
            any_text(),
            *[SIZES] * 4,
            module=NAMES.map(".".join),
            line=any_text(),
        )
    )
)
def test_a_packed_document_is_the_document(operators: list[OperatorCount]) -> None:
    written = document([replace(counted(), operators=tuple(operators)), ok()], {}, {})
    again = parsed(document_text(written).encode())
    assert {name: again[name] for name in LISTS} == {name: written[name] for name in LISTS}


def test_a_text_of_many_entries_is_written_once() -> None:
    operators = [
        OperatorCount(
            "clip", "aten.mul", 1, size, 0, 0, module=f"blocks.{n}", line="model.py:24 step"
        )
        for size in range(20)
        for n in range(50)
    ]
    text = document_text(document([replace(counted(), operators=tuple(operators))], {}))
    assert text.count("model.py:24 step") == text.count('"blocks.0-49"') == 1
    assert len(text) < 4_000
