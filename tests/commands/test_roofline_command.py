"""``dpbench roofline``, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench import Case
from dpbench.cli import main
from dpbench.metrics import unit
from dpbench.results.rows import STEP, Measurement, as_rows

TINY = ["--model-size", "tiny", "--batch-size", "4", "--seq-len", "16"]
DEVICE = "NVIDIA H200"
STANDARD, DPSGD = (Case(name, 4, 16, "tiny") for name in ("standard", "dpsgd"))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def saved(case: Case, device: str = DEVICE) -> Path:
    """A document as a run leaves it: bytes and times of one case."""
    phases = ("forward", "backward", "clip", "noise", "optimizer", STEP)
    metrics = {
        "ncu": {"dram_read_bytes": 1e9, "dram_write_bytes": 1e9},
        "timing": {"step_time_seconds": 1.0},
    }
    found = [
        Measurement(case, instrument, phase, metric, value, unit(metric), 0, device, "")
        for instrument, values in metrics.items()
        for metric, value in values.items()
        for phase in phases
    ]
    path = Path("run.json")
    path.write_text(json.dumps({"schema": 1, "rows": as_rows(found)}))
    return path


def test_a_case_is_counted_and_held_against_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--card", "h200", *TINY, "--trainer", "dpsgd", "--markdown", "out/roofline.md"]
    assert main(["roofline", *arguments]) == 0
    shown = capsys.readouterr()
    assert "tiny fp32, batch 4, sequence 16, logical (no hardware): roofline of logical" in (
        shown.out
    )
    assert "Roofs of NVIDIA H200: 4800 GB/s" in shown.out
    assert "Full backward hook" not in shown.err
    assert shown.out.count("bandwidth") == 6  # the step and its five phases
    assert "| · clip" in Path("out/roofline.md").read_text(encoding="utf-8")


def test_saved_rows_need_no_card_and_are_chosen_by_the_case_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["roofline", str(saved(DPSGD)), "--trainer", "DPSGDTrainer"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200: roofline of measured DRAM bytes" in shown
    assert "1000.0" in shown  # the measured milliseconds


def test_measured_ceilings_serve_as_roofs(capsys: pytest.CaptureFixture[str]) -> None:
    flops = dict.fromkeys(("fp32", "tf32", "bf16"), 1e13)
    ceilings = {"device": DEVICE, "bandwidth": 1e12, "flops": flops, "torch": "2.11"}
    Path("c.json").write_text(json.dumps({"ceilings": ceilings}))
    assert main(["roofline", str(saved(DPSGD)), "--ceilings", "c.json"]) == 0
    assert "Roofs of NVIDIA H200: 1000 GB/s and 10 TFLOP/s" in capsys.readouterr().out


def test_a_case_that_cannot_be_counted_leaves_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trainer of saved rows need not exist here."""
    rows = json.loads(saved(DPSGD).read_text())["rows"]
    unknown = [{**row, "trainer": "nowhere_to_be_found"} for row in rows]
    Path("run.json").write_text(json.dumps({"schema": 1, "rows": [*unknown, *rows]}))
    assert main(["roofline", "run.json"]) == 1
    shown = capsys.readouterr()
    assert "unknown trainer 'nowhere_to_be_found'" in shown.err
    assert "dpsgd" in shown.out
    assert "nowhere_to_be_found" not in shown.out


def test_nothing_but_cases_that_cannot_be_counted_is_a_failure() -> None:
    rows = json.loads(saved(DPSGD).read_text())["rows"]
    unknown = [{**row, "trainer": "nowhere_to_be_found"} for row in rows]
    Path("run.json").write_text(json.dumps({"schema": 1, "rows": unknown}))
    assert main(["roofline", "run.json"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (TINY, "no CUDA GPU is visible here, so name a card with --card: a100-40gb"),
        ([*TINY, "--card", "h300"], "unknown card 'h300'; choose from a100-40gb"),
        (["none.json"], "none.json: no such file"),
        (["text.json"], "run file text.json is damaged"),
        (["run.json", "--trainer", "dpsgd"], "run.json: no rows of the cases that were asked for"),
        (["run.json", "--trainer", "adam"], "unknown trainer 'adam'"),
        (["run.json", "run.json"], "run.json, run.json: the same case is in two of them"),
        (["run.json", "--card", "l4"], "measured on NVIDIA H200, not on NVIDIA L4"),
        (["run.json", "--ceilings", "run.json"], "not what bench/ceilings.py prints"),
        (["run.json", "--markdown", "/"], "is a directory; name a file"),
    ],
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(STANDARD)
    Path("text.json").write_text("no JSON")
    assert main(["roofline", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench roofline: ")
    assert words in line


def test_rows_of_a_card_that_is_not_known_are_refused_before_anything_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["roofline", str(saved(DPSGD, device="NVIDIA H20"))]) == 2
    assert "unknown card 'NVIDIA H20'" in capsys.readouterr().err
