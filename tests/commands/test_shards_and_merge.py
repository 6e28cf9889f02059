"""A grid in shards, by hand and on a cluster, is the run that one session makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.cli import main
from dpbench.core.files import locked
from dpbench.results.run import Run
from dpbench.results.schema import parsed
from tests.test_instrument_from_outside import write as write_meter

RUN = ["run", "--instrument=logical", "--seq-len=8", "--model-size=99x16x1x2"]
GRID = [*RUN, "--trainer=standard", "--trainer=dpsgd", "--batch-size=2", "--batch-size=4"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def metered(tmp_path: Path) -> Iterator[list[str]]:
    write_meter(tmp_path, hardware=False)
    yield ["run", "--instrument=meter:Power", *GRID[2:]]
    sys.modules.pop("meter", None)


def rows(name: str) -> list[dict[str, Any]]:
    """The rows in an order that does not depend on the order of a row's columns."""
    found: list[dict[str, Any]] = parsed(Path(name).read_bytes())["rows"]
    return sorted(found, key=partial(json.dumps, sort_keys=True))


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
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
    assert "2 of the requested cases are missing" in Path("part.md").read_text()
    assert main(["merge", "1.json", "whole.json"]) == 2


@pytest.mark.slow
def test_local_executor_measures_each_shard_in_a_job(
    metered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By an instrument of the project's own, for which no job has to wait for PyTorch."""
    pytest.importorskip("submitit")
    on_cluster = [*metered, "--cluster=local", "--shards=2", "--json", "all.json"]
    assert main(on_cluster) == 0
    captured = capsys.readouterr()
    assert "shard 2/2: finished" in captured.err
    assert "2/2       100%" in captured.out
    assert len({row["batch_size"] for row in rows("all.json")}) == 2
    first, second = sorted(Path("dpbench_shards").glob("shard-*.json"))
    done = first.stat().st_mtime_ns
    second.write_text("{")  # damaged
    assert main([*on_cluster, "--resume", "--trainer=micro_batch"]) == 2
    assert "because this session differs: grid's trainer ['standard', 'd" in capsys.readouterr().err
    with locked(first.with_name(".lock")):
        assert main([*on_cluster, "--resume"]) == 2
    assert "another process uses dpbench_shards: name another" in capsys.readouterr().err
    assert main([*on_cluster, "--resume"]) == 0
    assert "shard 2/2: finished" in (said := capsys.readouterr().err)
    assert "shard 1/2" not in said
    assert first.stat().st_mtime_ns == done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard=3/2"], "a shard is K/N with K from 1 to N, not '3/2'"),
        (["--shard=3/3"], "the grid has fewer cells than shards"),
        (["--cluster=local", "--shards=3"], "--shards must be from 1 to 2, the number of cells"),
        (["--cluster=local", "--autosave"], "--cluster does not take --autosave"),
        (["--cluster=local", "--cluster-set=fast"], "NAME=VALUE, not 'fast'"),
        (["--cluster=local", "--cluster-set=fast=1"], "cluster local: Parameter 'fast'"),
        (["--cluster=slurm"], "cluster slurm: Could not detect"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0].startswith("--cluster"):
        pytest.importorskip("submitit")
    assert main([*GRID, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_cluster_is_told_what_measures_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cluster=local", "--batch-size=2", "--batch-size=4"]) == 2
    assert "so name an instrument" in capsys.readouterr().err
