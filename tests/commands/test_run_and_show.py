"""``dpbench run`` and ``show``: what they show, in which order, and which files they write."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.gpu import Gpu
from dpbench.results.schema import parsed
from tests.programs import program

pytestmark = pytest.mark.usefixtures("counted_once")

REPLAY = Path(__file__).parents[1] / "replay_ncu.py"
REPORTS = sorted((REPLAY.parent / "data" / "tiny-fp32").glob("*.ncu-rep"))
CELL = [
    *("run", "--trainer=standard", "--trainer=dpsgd", "--batch-size=4", "--seq-len=64"),
    "--model-size=tiny",
]


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the two cases of which there is a recording, by ncu and by counting."""
    ncu = program(tmp_path / "ncu", REPLAY)
    gpu = Gpu("GPU-0", "NVIDIA H200", 141 * 10**9, "580.159.03")
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [gpu])
    monkeypatch.chdir(tmp_path)
    instruments = ["--instrument=ncu", "--instrument=logical"]
    return lambda *options: main([*CELL, *instruments, f"--ncu-path={ncu}", *options])


@pytest.mark.slow
def test_both_instruments_on_one_case_show_measured_over_logical(
    replayed: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert replayed("--json=run.json") == 0
    shown = capsys.readouterr().out
    assert "tiny fp32, batch 4, sequence 64, NVIDIA H200: DRAM measured ÷ logical" in shown
    assert "tiny fp32, batch 4, sequence 64, logical (no hardware): MB per step" in shown
    found = parsed((tmp_path / "run.json").read_bytes())["measured_over_logical"]
    assert {(row["trainer"], row["instrument"], row["device"]) for row in found} == {
        ("standard", "ncu", "NVIDIA H200"),
        ("dpsgd", "ncu", "NVIDIA H200"),
    }


def test_columns_order_groups_and_files(
    replayed: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "absent" / "summary.md"))
    table = ["--columns=dram_bytes,dram_over_logical", "--sort=dram_over_logical"]
    files = ["--csv=out/run.csv", "--markdown=out/run.md"]
    assert replayed(*table, "--group-by=device", *files) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    start = lines.index("tiny fp32, NVIDIA H200: MB per step")
    assert lines[start + 2].split() == ["case", "DRAM", "DRAM"]
    assert [line.split()[0] for line in lines[start + 5 : start + 7]] == ["dpsgd", "standard"]
    assert max(map(len, lines)) <= 80
    assert "WARNING: GITHUB_STEP_SUMMARY: " in shown.err
    with (tmp_path / "out/run.csv").open(newline="") as stream:
        assert {row["instrument"] for row in csv.DictReader(stream)} == {"ncu", "logical"}
    markdown = (tmp_path / "out/run.md").read_text(encoding="utf-8")
    assert "| DRAM ÷ logical |" in markdown.replace("  ", "")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--columns=nope", "unknown column 'nope'; choose from dram_read_bytes"),
        ("--group-by=nope", "unknown group 'nope'; choose from cell, device, phase"),
        ("--csv=/dev/null/x.csv", "directory /dev/null cannot be written"),
    ],
)
def test_bad_values_are_named_before_anything_is_measured(
    replayed: Callable[..., int], capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    assert replayed(option) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert words in shown.err
    assert not list(Path("ncu_reports").rglob("*.log"))


def test_show_takes_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    view = ["--columns=dram_ratio", "--group-by=phase", "--sort=dram_ratio"]
    assert main(["show", *map(str, REPORTS), *view]) == 0
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if "tiny fp32, phase" in line]
    assert titles[0] == "tiny fp32, phase forward, NVIDIA H200: per step"
    assert titles[-1] == "tiny fp32, phase step, NVIDIA H200: per step"
    assert main(["show", str(REPORTS[0]), "--sort=nope"]) == 2
    assert "unknown column 'nope'" in capsys.readouterr().err


def test_show_prints_what_the_run_printed(
    replayed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed("--json=run.json") == 0
    printed = capsys.readouterr().out
    assert main(["show", "run.json"]) == 0
    assert capsys.readouterr().out == printed


def test_a_run_of_nothing_is_not_shown_as_a_blank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"schema": 2, "rows": []}')
    assert main(["show", str(empty)]) == 2
    assert capsys.readouterr().err == f"dpbench show: {empty}: nothing to show\n"
    assert main(["compare", str(empty), str(empty)]) == 2
    assert "json has no rows" in capsys.readouterr().err
