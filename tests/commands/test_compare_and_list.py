"""``dpbench compare`` and ``dpbench list``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.cli import main
from dpbench.results.storage import Storage

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GRID1 = Path(__file__).parents[1] / "data/saved/grid1.json"


def more(row: dict[str, Any]) -> None:
    """Clipping moves 2 % more."""
    if row["phase"] == "clip" and row["unit"] == "B":
        row["value"] *= 1.02


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A project with the committed run, and the same with heavier clipping."""
    monkeypatch.chdir(tmp_path)
    storage = Storage(tmp_path / ".dpbench")
    save(storage, "before")
    save(storage, "after", more, started="2026-01-02T03:04:05+00:00", regressed=True)
    return storage


def save(
    storage: Storage,
    name: str,
    change: Callable[[dict[str, Any]], object] = lambda row: None,
    **session: Any,
) -> None:
    data = json.loads(GRID1.read_text())
    data["session"] = session
    for row in data["rows"]:
        change(row)
    storage.allocate(name, "NVIDIA H200", json.dumps(data))


@pytest.mark.usefixtures("storage")
def test_change_within_the_limit_is_shown_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1", "2", "--fail", "dram_bytes@clip:3%", "--fail=dram_ratio:1%"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("0001_before -> 0002_after\n")
    assert "1b fp32, batch 8, sequence 256, ncu on NVIDIA H200" in out
    [line] = [text for text in out.splitlines() if "177.1 GB" in text][:1]
    assert line.split() == [
        "dpsgd",
        "dram_bytes@clip",
        "177.1",
        "GB",
        "180.7",
        "GB",
        "+2.00%",
        "3%",
    ]
    assert max(map(len, out.splitlines())) <= 80


def test_cases_that_a_limit_cannot_judge_are_named(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(GRID1.read_text())
    data["rows"] = [r for r in data["rows"] if (r["trainer"], r["seq_len"]) != ("standard", 256)]
    storage.allocate("partly", "NVIDIA H200", json.dumps(data))
    assert main(["compare", "3", "1", "--fail", "dram_ratio:3%"]) == 1
    said = "dram_ratio:3% was not checked for dpsgd-bs8-seq256-1b-fp32, dpsgd_fgc-bs8-seq256-"
    assert said in capsys.readouterr().err


def without(instrument: str) -> Callable[[dict[str, Any]], object]:
    """DP-SGD has no rows by an instrument: they are another's."""
    return lambda row: (
        row.update(instrument="other")
        if (row["trainer"], row["instrument"]) == ("dpsgd", instrument)
        else None
    )


def renamed(row: dict[str, Any]) -> None:
    """The trainer has another name, and reads three times as much."""
    if row["trainer"] == "dpsgd":
        row.update(trainer="dpsgd_v2", value=3 * row["value"])


@pytest.mark.parametrize(
    ("change", "session", "limit", "words"),
    [
        (without("ncu"), {}, "dram_bytes:5%", "fp32: not in 0003_lost"),
        (
            renamed,
            {},
            "dram_bytes:5%",
            "dram_bytes:5% was not checked for dpsgd-bs8-seq256-1b-fp32",
        ),
        (
            lambda row: None,
            {"status": "interrupted", "cases_asked": 20},
            "dram_bytes:5%",
            "a limit was not checked: 0003_lost was interrupted after 16 of 20 cases",
        ),
    ],
    ids=["ncu", "renamed", "interrupted"],
)
def test_what_a_limit_could_not_judge_is_exit_code_1(
    storage: Storage,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], object],
    session: dict[str, Any],
    limit: str,
    words: str,
) -> None:
    save(storage, "lost", change, **session)
    assert main(["compare", "1", "3", "--fail", limit]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("storage")
def test_change_beyond_a_limit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1", "2", str(GRID1), "--fail", "dram_bytes@clip:1%"]) == 1
    captured = capsys.readouterr()
    first, *exceeded = captured.err.splitlines()
    assert first == "dpbench compare: 0001_before -> 0002_after: 12 regressions"
    assert len(exceeded) == 12
    number = "dram_bytes@clip of dpsgd-bs8-seq256-1b-fp32: 91.3 GB -> 93.1 GB, +2.00%, limit 1%"
    assert f"dpbench compare: 0001_before -> 0002_after: {number}" in exceeded
    assert captured.out.count("1% exceeded") == 12
    assert "0001_before -> grid1\n" in captured.out


@pytest.mark.usefixtures("storage")
def test_case_that_fails_now_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = json.loads(GRID1.read_text())
    data["rows"] = [row for row in data["rows"] if row["trainer"] != "dpsgd"]
    for case in data["cases"]:
        if case["trainer"] == "dpsgd":
            case["error"] = "CaseOutOfMemory"
    (tmp_path / "worse.json").write_text(json.dumps(data))
    assert main(["compare", "1", "worse.json"]) == 1
    captured = capsys.readouterr()
    assert "worse: dpsgd-bs16-seq1024-1b-fp32: CaseOutOfMemory" in captured.err
    assert "not in worse: dpsgd-bs16-seq1024-1b-fp32, " in captured.out


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1", "9"], "no run number 0009 in .dpbench; its latest runs are 0001, 0002"),
        (["1", str(RESULTS / "h200-ncu-precisions.json.xz")], "the runs have no case in common"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["compare", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench compare: ")
    assert words in line


def test_other_devices_only_across(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    save(storage, "elsewhere", lambda row: row.update(device="NVIDIA A100"))
    assert main(["compare", "1", "3"]) == 2
    assert "cannot be compared; compare different devices with --across" in capsys.readouterr().err
    assert main(["compare", "1", "3", "--across"]) == 0
    assert "ncu on NVIDIA H200 -> NVIDIA A100" in capsys.readouterr().out


def test_list_shows_runs_and_names_what_it_skips(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    save(storage, "going", status="interrupted", cases_asked=20)
    save(storage, "stopped", status="interrupted", cases_asked=20)
    damaged = storage.allocate("damaged", None, "{")
    with storage.writing(storage.find("3")):
        assert main(["list"]) == 0
    captured = capsys.readouterr()
    assert [" ".join(line.split()) for line in captured.out.splitlines()[4:]] == [
        "0001 before NVIDIA H200 - 16/16 complete",
        "0002 after NVIDIA H200 2026-01-02 03:04 16/16 regressed",
        "0003 going NVIDIA H200 - 16/20 running",
        "0004 stopped NVIDIA H200 - 16/20 interrupted",
    ]
    assert f"skipped: run file {damaged.relative_to(Path.cwd())} cannot be read" in captured.err
    assert main(["list", "--storage", "absent"]) == 0
    assert capsys.readouterr().out == "no runs in absent\n"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("storage")
def test_runs_are_compared_by_name_and_the_newest_of_a_name_counts(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    save(storage, "before", more)
    assert main(["compare", "after", "before"]) == 0
    assert capsys.readouterr().out.startswith("0002_after -> 0003_before\n")


@pytest.mark.usefixtures("storage")
def test_columns_are_metrics_and_phases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "dram_bytes@clip,dram_bytes@forward"
    assert main(["compare", "before", "after", "--columns", names]) == 0
    lines = lines_of(capsys)
    first = lines.index(["trainer", "metric", "before", "after", "change", "limit"]) + 2
    of_cell = lines[first : first + 7]
    assert [line[:2] for line in of_cell[:3]] == [
        ["standard", "dram_bytes@forward"],
        ["dpsgd", "dram_bytes@clip"],
        ["dpsgd", "dram_bytes@forward"],
    ]
    assert [line[-2] for line in of_cell[:3]] == ["+0.00%", "+2.00%", "+0.00%"]
    assert main(["compare", "before", "after", "--columns", "dram_byte"]) == 2
    assert "did you mean dram_bytes?" in capsys.readouterr().err


def test_runs_that_name_trainers_of_before_are_still_shown_and_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(RESULTS / "h200-opacus-changes.json.xz")
    for command in (["show", run], ["compare", run, run]):
        assert main(command) == 0
        assert "\nlean:changes=kept " in capsys.readouterr().out
