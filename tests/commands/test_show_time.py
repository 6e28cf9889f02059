"""``dpbench show --time``, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.run import Run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
CUPTI, GRID1 = RESULTS / "h200-methods-256.json.xz", ROOT / "tests/data/saved/grid1.json"
SESSION = RESULTS / "h200-cupti-grid1-1.json.xz"
COUNTED = ROOT / "tests/data/logical-1b-bs8-seq256.json"


def saved(path: Path, document: dict[str, object]) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def of_cell(path: Path, file: Path, **axes: object) -> str:
    """A run of some cases of another."""
    document = Run.load(path).document
    of_opacus = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")
    rows = [row for row in document["rows"] if axes.items() <= row.items()]
    rows = [row for row in rows if row["trainer"] in of_opacus]
    return saved(file, {"schema": 2, "rows": rows})


@pytest.fixture
def short_fp32(tmp_path: Path) -> str:
    return of_cell(SESSION, tmp_path / "run.json", batch_size=8, seq_len=256)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_each_phase_is_held_against_its_bounds_and_its_idle_time(
    short_fp32: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(capsys, short_fp32, COUNTED, "--time", "--markdown", tmp_path / "time.md")
    lines = {line[:11].strip(): line.split() for line in text.splitlines() if line}
    assert "time    arithm.    bytes    idle    left" in text
    assert lines["standard"][1:] == ["329.4", "312.5", "21.3", "0.0", "13.1", "arithmetic"]
    assert "· noise        51.3        0.0      8.3    36.8     6.3  launch-bound (28%)" in text
    assert "These two bounds overlap" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "| · noise" in (tmp_path / "time.md").read_text(encoding="utf-8")


def test_what_a_private_step_takes_more_is_explained_in_shares_that_overlap(
    short_fp32: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, short_fp32, COUNTED, "--time")
    _, added = text.split("breakdown of")
    rows = [line.split() for line in added.splitlines() if line.startswith("dpsgd")]
    assert rows == [
        ["dpsgd", "235.1", "43%", "32%", "17%", "27%"],
        ["dpsgd_ghost", "315.3", "75%", "10%", "1%", "20%"],
        ["dpsgd_fgc", "402.9", "77%", "21%", "0%", "20%"],
    ]
    assert "Shares overlap, so they need not add up to 100%" in " ".join(added.split())


def test_runs_that_divide_by_different_baselines_are_shown_one_by_one(
    short_fp32: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(of_cell(CUPTI, tmp_path / "other.json", precision="bf16", seq_len=256))
    session = {"session": {"grid": {"baseline": "dpsgd"}}}
    saved(other, json.loads(other.read_text(encoding="utf-8")) | session)
    assert main(["show", short_fp32, str(other), "--time"]) == 2
    assert "are dpsgd and standard: show the runs one at a time" in capsys.readouterr().err


def test_a_missing_condition_is_named_with_what_would_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dpsgd = of_cell(GRID1, tmp_path / "run.json", trainer="dpsgd", batch_size=8, seq_len=256)
    text = " ".join(shown(capsys, dpsgd, "--time").split())
    assert "No operations were counted for dpsgd: --instrument logical counts them" in text
    assert "How busy the GPU was with dpsgd was not measured" in text
    assert "--instrument cupti measures it" in text
    assert "beyond standard's" not in text


def test_a_bound_beyond_the_time_is_said_to_be_wrong(
    short_fp32: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((RESULTS / "h200-ceilings.json").read_text())
    document["ceilings"]["flops"]["fp32"] /= 1.2
    own = saved(tmp_path / "ceilings.json", document)
    text = " ".join(shown(capsys, short_fp32, COUNTED, "--time", own).split())
    assert (
        "A bound exceeds the time in which the GPU was busy: standard forward, standard backward"
        in text
    )
    assert "Either the ceiling is too low, or" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([COUNTED, "--time"], "no step was timed; dpbench run --instrument cupti times"),
        ([GRID1, GRID1, "--time"], "two of the runs have the same case"),
        ([GRID1, "--time", GRID1], "no file of measured ceilings"),
        ([GRID1, "--time", "--roofline"], "--roofline and --time show different tables"),
        (["other.json", "--time"], "no measured ceilings of NVIDIA T4: measure them"),
    ],
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads(GRID1.read_text())
    rows = [{**row, "device": "NVIDIA T4"} for row in document["rows"][:200]]
    saved(Path("other.json"), {"schema": 2, "rows": rows})
    assert main(["show", *map(str, arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench show: ")
    assert words in line
