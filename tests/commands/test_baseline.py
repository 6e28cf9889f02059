"""``--baseline``: ratios to another trainer than the standard one, in all that shows or judges."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.results.run import Run
from dpbench.results.schema import parsed

pytestmark = pytest.mark.usefixtures("counted_once")

Asked = Callable[[str], tuple[int, str]]
"""A command's exit status and what it showed."""

CELL = "--batch-size=4 --seq-len=8 --model-size=50x16x1x2 --instrument=logical"
TRAINERS = "--trainer=standard --trainer=dpsgd --trainer=dpsgd_ghost"


@pytest.fixture
def dpbench(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Asked:
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> tuple[int, str]:
        status = main(shlex.split(command))
        shown = capsys.readouterr()
        return status, " ".join((shown.out + shown.err).split())

    return run


@pytest.mark.usefixtures("counted_here")
def test_ratios_are_to_the_baseline_that_was_named(dpbench: Asked, tmp_path: Path) -> None:
    assert dpbench(f"run {CELL} {TRAINERS} --save=usual")[0] == 0
    own = "--baseline=tests.workloads.digits:OwnTrainer "
    mine = f"{CELL} {TRAINERS} --trainer=OwnTrainer --columns=logical_bytes,logical_ratio"
    status, shown = dpbench(f"run {own} {mine} --json=mine.json")
    assert status == 0
    assert "÷ OwnTrainer" in shown
    assert "÷ std" not in shown
    document = parsed(Path("mine.json").read_bytes())
    ratios = {
        row["trainer"]: row["ratio"]
        for row in document["ratios"]
        if (row["phase"], row["metric"]) == ("step", "logical_bytes")
    }
    assert set(ratios) == {"standard", "dpsgd", "dpsgd_ghost"}
    assert ratios["dpsgd"] == 1  # it trains as the baseline does
    assert ratios["standard"] < ratios["dpsgd_ghost"] < 1
    assert Run.load(tmp_path / "mine.json").baseline == "OwnTrainer"
    assert "logical MB by phase (÷ OwnTrainer)" in dpbench("show mine.json")[1]
    assert dpbench("show mine.json --html page.html")[0] == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "the ratio to the step of OwnTrainer" in page
    assert "÷ standard" not in page

    differ = (
        "atios are not compared, because the baseline of 0001_usual is standard and the baseline "
        "of mine is OwnTrainer"
    )
    assert differ in dpbench("compare 1 mine.json")[1]
    status, shown = dpbench("compare 1 mine.json --fail=logical_ratio:5% --fail=logical_bytes:5%")
    assert status == 1
    assert f"logical_ratio:5% was not checked: r{differ}" in shown
    assert "1 regression" not in shown
    assert dpbench("compare mine.json mine.json --fail=logical_ratio:1%")[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
def test_a_ratio_needs_the_baseline_along_every_axis(dpbench: Asked) -> None:
    axes = "--optimizer=sgd --optimizer=adamw --baseline=dpsgd"
    assert (
        dpbench(f"run {CELL} --trainer=dpsgd --trainer=dpsgd_ghost {axes} --json=both.json")[0] == 0
    )
    document = parsed(Path("both.json").read_bytes())
    kept = [
        {name: [r for r in document[name] if not _is_adam_of(r, "dpsgd")]}
        for name in ("rows", "cases")
    ]
    Path("one.json").write_text(json.dumps(document | kept[0] | kept[1]))
    status, shown = dpbench("compare both.json one.json --fail=logical_ratio:1%")
    assert status == 1
    lacking = Case("dpsgd", 4, 8, "50x16x1x2", optimizer="adamw").id
    assert f"of the baseline {lacking} to divide by" in shown
    assert (
        "No ratio: the 'dpsgd' trainer was not measured for this case."
        in dpbench("show one.json")[1]
    )


def _is_adam_of(row: dict[str, str], trainer: str) -> bool:
    return (row["trainer"], row["optimizer"]) == (trainer, "adamw")


@pytest.mark.parametrize(
    ("baseline", "said"),
    [("'nope'", "unknown trainer 'nope'"), ("3", "3 is not a name")],
)
def test_a_baseline_that_is_no_trainer_is_refused(
    dpbench: Asked, tmp_path: Path, baseline: str, said: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"trainer = 'dpsgd'\nbatch_size = 8\nseq_len = 8\nbaseline = {baseline}\n")
    status, shown = dpbench(f"run --grid={path}")
    assert status == 2
    assert f"grid file {path}: {said}" in shown
