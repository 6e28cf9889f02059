"""A grid in shards is the run that one session makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.results.run import Run

RUN = ["run", "--instrument=logical", "--seq-len=8", "--model-size=99x16x1x2"]
GRID = [*RUN, "--trainer=standard", "--trainer=dpsgd", "--batch-size=2", "--batch-size=4"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(name: str) -> list[dict[str, Any]]:
    return sorted(json.loads(Path(name).read_bytes())["rows"], key=json.dumps)


def test_merged_shards_have_the_rows_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRID, "--json=whole.json"]) == 0
    for number in (1, 2):
        assert main([*GRID, f"--shard={number}/2", f"--json={number}.json"]) == 0
    capsys.readouterr()
    assert main(["merge", "1.json", "2.json", "--json=merged.json", "--save=grid"]) == 0
    assert "2/2       100%" in capsys.readouterr().out
    assert rows("merged.json") == rows("whole.json")
    assert Run.load(Path(".dpbench/cpu-logical/0001_grid.json")).status == "complete"
    assert main(["compare", "whole.json", "merged.json", "--fail=logical_bytes:±0.1%"]) == 0
    assert main(["merge", "2.json", "--markdown=part.md"]) == 1
    assert "shard 1/2 is missing" in capsys.readouterr().err
    assert "2 of the cases asked for are missing" in Path("part.md").read_text()
    assert main(["merge", "1.json", "whole.json"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard=3/2"], "a shard is K/N, from 1/N to N/N, not '3/2'"),
        (["--shard=3/3"], "the grid has fewer cells than shards"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GRID, *words]) == 2
    assert said in capsys.readouterr().err
