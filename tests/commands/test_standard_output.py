"""A file on standard output is all that is there: tables are printed elsewhere then."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from dpbench.core.case import AXES

GRID1 = str(Path(__file__).parents[1] / "data/saved/grid1.json")
SIZE = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]
COUNT = ["run", "--instrument=logical", *SIZE, "--trainer=standard"]


def printed(*words: str) -> tuple[str, str]:
    """What a command prints to standard output and to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "dpbench", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
@pytest.mark.parametrize("words", [COUNT, ["merge", GRID1]], ids=lambda words: words[0])
def test_json_there_is_json(words: list[str], name: str) -> None:
    out, err = printed(*words, f"--json={name}")
    assert json.loads(out)["rows"]
    assert "Cases by trainer" in err


@pytest.mark.slow
def test_csv_there_is_csv() -> None:
    out, err = printed(*COUNT, "--csv=/dev/stdout")
    rows = list(csv.DictReader(StringIO(out)))
    assert {row["trainer"] for row in rows} == {"standard"}
    assert {*AXES} <= rows[0].keys()
    assert "Cases by trainer" in err


def test_tables_there_are_there_once() -> None:
    out, err = printed("show", GRID1, "--markdown=/dev/stdout")
    assert out.startswith("#")
    assert out.count("Cases by trainer") == err.count("Cases by trainer") == 1


def test_a_page_there_is_a_page() -> None:
    out, err = printed("show", GRID1, "--html=/dev/stdout")
    assert out.rstrip().endswith("</html>")
    assert not err


def test_a_page_in_a_file_is_told_with_its_size(tmp_path: Path) -> None:
    out, _ = printed("show", GRID1, f"--html={tmp_path / 'page.html'}")
    assert (
        out == f"{tmp_path / 'page.html'}: {(tmp_path / 'page.html').stat().st_size / 1e6:.1f} MB\n"
    )
