"""Tests of the GitHub Action's script, which compares two commits and updates one comment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.seeded import run_of

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COUNT = "dpbench exec --instrument logical --json {json} train.py"
COPY = "cp run.json {json}"
"""Command used in place of counting: each commit contains the run of its script."""

GH = '#!/bin/sh\necho "$@" >> "$SAID"\n'
"""Program used in place of ``gh``, which needs an account. It writes its arguments to a file."""


class Repository:
    """A repository with a base commit, and with `GH` as the program ``gh``."""

    def __init__(self, place: Path) -> None:
        programs = place / "programs"
        programs.mkdir()
        (programs / "gh").write_text(GH)
        (programs / "dpbench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dpbench "$@"\n')
        for program in programs.iterdir():
            program.chmod(0o755)
        self.place, self.said = place / "project", place / "said"
        self.place.mkdir()
        self.said.touch()
        name = {
            f"GIT_{who}_{what}": "x"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        self.environment = (
            os.environ
            | name
            | {
                "PATH": f"{programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "SAID": str(self.said),
            }
        )
        self.git("init", "-q")
        self.commit(SCRIPT)
        self.base = self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        found = subprocess.run(
            ["git", *arguments],
            cwd=self.place,
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return found.stdout

    def commit(self, script: str) -> None:
        (self.place / "train.py").write_text(script)
        self.git("add", ".")
        self.git("commit", "-qm", "change")

    def run(self, **given: str) -> tuple[int, str]:
        usual = {
            "COUNT": COUNT,
            "LIMITS": "logical_bytes:1%",
            "BASE": self.base,
            "PULL_REQUEST": "7",
        }
        done = subprocess.run(
            [ROOT / "action/compare.sh"],
            cwd=self.place,
            env=self.environment | usual | {"PULL_REQUEST": "7"} | given,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    return Repository(tmp_path)


@pytest.mark.parametrize("count", [COPY, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_a_change_that_moves_more_bytes_fails_and_updates_one_comment(
    repository: Repository, count: str
) -> None:
    run = repository.place / "run.json"
    run.write_text(run_of([1e6], metric="logical_bytes"))
    repository.commit(SCRIPT)
    repository.base = repository.git("rev-parse", "HEAD").strip()
    run.write_text(run_of([1.1e6], metric="logical_bytes"))
    repository.commit(SCRIPT.replace("optimizer.step()", "model.weight.clone(); optimizer.step()"))
    status, said = repository.run(COUNT=count)
    assert status == 1
    assert "1% exceeded" in said
    assert f"logical_bytes@step of {'dpsgd' if count == COPY else 'train'}" in said
    asked = repository.said.read_text()
    assert asked.startswith("pr comment 7 --edit-last --create-if-none --body-file ")
    assert asked.count("\n") == 1
    assert repository.git("worktree", "list").count("\n") == 1


@pytest.mark.slow
def test_a_change_that_moves_equal_bytes_passes(repository: Repository) -> None:
    repository.commit(SCRIPT.replace("lr=0.1", "lr=0.2"))
    status, said = repository.run(PULL_REQUEST="")
    assert status == 0, said
    assert "logical_bytes" in said
    assert not repository.said.read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"COUNT": "dpbench exec train.py"}, "The input count must write a run to {json}"),
        ({"BASE": "0" * 40}, "cannot be fetched"),
        ({"COUNT": "false {json}"}, "cannot be counted, so nothing was judged"),
    ],
)
def test_a_commit_that_was_not_compared_does_not_pass(
    repository: Repository, given: dict[str, str], words: str
) -> None:
    status, said = repository.run(**given)
    assert status == 1
    assert words in said
