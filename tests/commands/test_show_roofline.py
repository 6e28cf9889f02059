"""``dpbench show --roofline``, as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dpbench
from dpbench import Case
from dpbench.commands.cli import main
from dpbench.core.metrics import unit
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement

DEVICE = "NVIDIA H200"
STANDARD, DPSGD = (Case(name, 4, 16, "tiny") for name in ("standard", "dpsgd"))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


MEASURED = {
    "ncu": {"dram_read_bytes": 1e9, "dram_write_bytes": 1e9},
    "timing": {"step_time_seconds": 1.0},
}
COUNTED = {"logical": {"flops": 1e9, "logical_read_bytes": 1e9, "logical_write_bytes": 1e9}}
ROOFS = {"bandwidth": 1e12, "flops": dict.fromkeys(("fp32", "tf32", "bf16"), 1e13), "torch": "2"}


def saved(name: str, case: Case, metrics: dict[str, dict[str, float]], device: str = DEVICE) -> str:
    """A document as a run leaves it: these numbers of one case."""
    phases = ("forward", "backward", "clip", "noise", "optimizer", STEP)
    found = [
        Measurement(case, instrument, phase, metric, value, unit(metric), 0, where, "")
        for instrument, values in metrics.items()
        for where in [NO_HARDWARE if instrument == "logical" else device]
        for metric, value in values.items()
        for phase in phases
    ]
    Path(name).write_text(json.dumps({"schema": 2, "rows": [row.as_row() for row in found]}))
    return name


def test_a_counted_case_is_held_against_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    run = saved("run.json", DPSGD, COUNTED)
    assert main(["show", run, "--roofline", "h200", "--markdown", "out/roofline.md"]) == 0
    shown = capsys.readouterr().out
    assert "tiny fp32, batch 4, sequence 16, logical (no hardware): roofline of logical" in shown
    assert "Roofs of NVIDIA H200: 4800 GB/s" in shown
    assert shown.count("bandwidth") == 6  # the step and its five phases
    assert "| · clip" in Path("out/roofline.md").read_text(encoding="utf-8")


def test_measured_rows_need_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    """The operations are counted in another run, of more cases."""
    files = [
        saved("run.json", DPSGD, MEASURED),
        saved("c.json", DPSGD, COUNTED),
        saved("s.json", STANDARD, COUNTED),
    ]
    assert main(["show", *files, "--roofline"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200: roofline of measured DRAM bytes" in shown
    assert "1000.0" in shown  # the measured milliseconds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["counted.json", "--roofline"],
            "this machine has no CUDA GPU, so name a card with --roof",
        ),
        (["counted.json", "--roofline", "h300"], "unknown card 'h300'; choose from a100-40gb"),
        (["run.json", "--roofline"], "no operations were counted for standard-bs4-seq16-tiny-fp32"),
        (["run.json", "run.json", "--roofline"], "two of the runs have the same case"),
        (["both.json", "--roofline", "l4"], "on NVIDIA H200, so the roofs of NVIDIA L4"),
        (["both.json", "--roofline", "run.json"], "no file of measured ceilings"),
        (["h20.json", "--roofline"], "unknown card 'NVIDIA H20'"),
    ],
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("run.json", STANDARD, MEASURED)
    saved("counted.json", STANDARD, COUNTED)
    saved("both.json", STANDARD, MEASURED | COUNTED)
    saved("h20.json", STANDARD, MEASURED | COUNTED, device="NVIDIA H20")
    assert main(["show", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench show: ")
    assert words in line


@pytest.mark.parametrize("name", ["ceilings.json", "of.mine/ceilings.txt"])
def test_measured_roofs_are_read_whatever_their_file_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(json.dumps({"ceilings": {"device": DEVICE, **ROOFS}}))
    run = saved("run.json", DPSGD, MEASURED | COUNTED)
    assert main(["show", run, "--roofline", name]) == 0
    assert "Roofs of NVIDIA H200: 1000 GB/s and 10 TFLOP/s" in capsys.readouterr().out


def test_nothing_recommends_what_only_the_repository_has() -> None:
    package = Path(dpbench.__file__).parent
    named = re.compile(r"python bench/|: bench/|of bench/")
    assert [p.name for p in package.rglob("*.py") if named.search(p.read_text("utf-8"))] == []
