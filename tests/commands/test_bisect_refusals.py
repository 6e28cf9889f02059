"""``dpbench bisect``: what it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench.commands.bisect import with_json
from dpbench.commands.cli import main
from dpbench.core.errors import ConfigurationError
from tests.commands.seeded import LIMIT, Repository, tried

PATIENCE = 300
"""Seconds after which what should have happened will not; on a busy machine all takes long."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LIMIT, "main~1..main", "--"], "end with -- COMMAND"),
        ([LIMIT, "main~1..main", "--", "pytest"], "with {json} in place of the run's file"),
        (["peak_memory_bytes", "main~1..main", "--", "{json}"], "write METRIC[@PHASE]:5%"),
        ([LIMIT, "main~1..other", "--", "{json}"], "finds no range 'main~1..other' here"),
        ([LIMIT, "main..main~1", "--", "{json}"], "finds no range 'main..main~1' here"),
    ],
)
def test_bad_input_gets_one_line(
    repository: Repository,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository.commit_all([1e6, 1e6])
    assert main(["bisect", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench bisect: ")
    assert words in line


def test_ends_that_are_equally_good_get_one_line(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 2e6, 1.01e6])
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", *repository.writes]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"dpbench bisect: BAD does not exceed {LIMIT}, compared with GOOD\n"
    assert len(tried(captured.out)) == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "echo the compiler is missing >&2; exit 3 #{json}",
            "(exit code 3): the compiler is missing",
        ),
        ("true {json}", "wrote no run (exit code 0): "),
        ("echo {} > {json}", "run.json cannot be read: "),
    ],
)
def test_a_command_that_writes_no_run_says_why(
    repository: Repository, command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 1e6, 2e6])
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", "sh", "-c", command]) in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert repository.worktrees == 1


def test_a_run_without_the_metric_says_so(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 1e6, 2e6])
    assert main(["bisect", "flops:1%", f"{commits[0]}..main", "--", *repository.writes]) == 2
    assert "flops:1% was not checked: run has no flops of the step" in capsys.readouterr().err


@pytest.mark.slow
def test_an_ended_search_leaves_no_worktree_and_no_process(
    repository: Repository, tmp_path: Path
) -> None:
    commits = repository.commit_all([1e6, 1e6, 2e6])
    started = tmp_path / "started"
    command = [
        "sh",
        "-c",
        f"echo $$ > '{started}.part'; mv '{started}.part' '{started}'; sleep 100 #{{json}}",
    ]
    words = ["bisect", LIMIT, f"{commits[0]}..main", "--", *command]
    process = subprocess.Popen(
        [sys.executable, "-m", "dpbench", *words],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert repository.worktrees == 3
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[1] == "dpbench bisect: interrupted\n"
    assert process.returncode == 130
    assert repository.worktrees == 1
    assert not list((tmp_path / "temporary").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize(
    ("command", "completed"),
    [
        ("dpbench run --trainer x", "dpbench run --json {json} --trainer x"),
        ("python -m dpbench exec train.py -a", "python -m dpbench exec --json {json} train.py -a"),
        ("pytest --dpbench-json={json}", "pytest --dpbench-json={json}"),
    ],
)
def test_dpbench_gets_the_option_for_its_file(command: str, completed: str) -> None:
    assert with_json(command.split()) == completed.split()


@pytest.mark.parametrize("command", ["pytest", "dpbench compare 1 2"])
def test_another_command_must_name_the_file(command: str) -> None:
    with pytest.raises(ConfigurationError, match="end with -- COMMAND"):
        with_json(command.split())
