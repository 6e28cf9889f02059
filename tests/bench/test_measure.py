"""Measuring the evidence in slices, for real, on the CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.measure import PLAN, command, is_complete, measure
from dpbench.commands.cli import main

NEEDS = {"hf-": "transformers", "fastdp": "fastDP"}
"""Packages, by what in a command needs them."""

TINY = "--instrument logical --model-size tiny --batch-size 2 --seq-len 8"


def test_each_command_is_one_that_dpbench_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = {word for word, package in NEEDS.items() if not find_spec(package)}
    for name, options in PLAN.items():
        if not any(word in options for word in lacking):
            given = [*command(name, options, tmp_path)[3:], "--shard", "0/1"]
            assert main(given) == 2, name  # refused once all is read
            assert "shard" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_call_has_no_time_for_is_left_to_the_next(tmp_path: Path) -> None:
    plan = {"one": f"{TINY} --trainer standard"}
    assert measure(plan, tmp_path, 0) == ["one"]
    assert measure(plan, tmp_path, 120) == []
    assert is_complete(tmp_path / "h200-one.json.xz")
    assert not (tmp_path / "h200-one.json").exists()


def test_an_interrupted_file_is_not_complete(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"session": {"status": "interrupted"}}))
    assert not is_complete(file)
    assert not is_complete(tmp_path / "none.json")
