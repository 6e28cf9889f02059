"""Tests of the GitHub Action's script, which compares two commits and updates one comment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.seeded import HOLE, run_of

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

PACKAGE = """
import json, sys
from pathlib import Path
import mine
from dpbench.child.imported import imported_files
document = json.loads(Path("run.json").read_text().replace("123456789.0", repr(mine.MOVED)))
document["cases"][0]["imported"] = imported_files()
Path(sys.argv[1]).write_text(json.dumps(document))
"""
"""Program used in place of counting, which writes the number in the package that it imports."""

GH = """#!/bin/bash
case "$1 $2" in
  "pr view")
    for number in $(ls "$COMMENTS"); do
      echo "https://x/pull/7#issuecomment-$number $(head -n 1 "$COMMENTS/$number")"
    done ;;
  "pr comment") cp "$5" "$COMMENTS/$(ls "$COMMENTS" | wc -l)" ;;
  "api --silent") cp "${7#body=@}" "$COMMENTS/${5##*/}" ;;
esac
"""
"""Program used in place of ``gh``, which needs an account. Each of its comments is a file."""

FORK = '#!/bin/sh\n[ "$2" = view ] || { echo "HTTP 403" >&2; exit 1; }\n'
"""Like ``gh`` in a pull request from a fork, which may read comments and not write them."""


class Repository:
    """A repository with a base commit, and with `GH` as the program ``gh``."""

    def __init__(self, place: Path) -> None:
        programs = place / "programs"
        programs.mkdir()
        self.gh = programs / "gh"
        self.gh.write_text(GH)
        (programs / "dpbench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dpbench "$@"\n')
        for program in programs.iterdir():
            program.chmod(0o755)
        self.place, self.folder = place / "project", place / "comments"
        self.place.mkdir()
        self.folder.mkdir()
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
                "COMMENTS": str(self.folder),
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

    @property
    def comments(self) -> list[str]:
        """The comments of the pull request, the oldest first."""
        return [each.read_text() for each in sorted(self.folder.iterdir())]

    def compared(self, moved: float) -> None:
        """Commit a base whose step moves 1 MB, and a change whose step moves so many bytes."""
        run = self.place / "run.json"
        run.write_text(run_of([1e6], metric="logical_bytes"))
        self.commit(SCRIPT)
        self.base = self.git("rev-parse", "HEAD").strip()
        run.write_text(run_of([moved], metric="logical_bytes"))
        clones = SCRIPT.replace("optimizer.step()", "model.weight.clone(); optimizer.step()")
        self.commit(clones)

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
def test_a_change_that_moves_more_bytes_fails_and_says_so_in_a_comment(
    repository: Repository, count: str
) -> None:
    repository.compared(1.1e6)
    status, said = repository.run(COUNT=count)
    assert status == 1
    assert f"logical_bytes@step of {'dpsgd' if count == COPY else 'train'}" in said
    (comment,) = repository.comments
    assert "1% exceeded" in comment
    assert comment.partition("\n")[2] in said
    assert repository.git("worktree", "list").count("\n") == 1


def test_each_command_updates_its_own_comment_and_no_other(repository: Repository) -> None:
    (repository.folder / "0").write_text("of another workflow\n")
    repository.compared(1.1e6)
    other = f": '-->'\n{COPY}"
    assert [repository.run(COUNT=count)[0] for count in (COPY, other)] == [1, 1]
    repository.compared(1e6)
    assert repository.run(COUNT=other)[0] == 0
    foreign, first, second = repository.comments
    assert foreign == "of another workflow\n"
    assert "1% exceeded" in first
    assert "logical_bytes" in second
    assert "exceeded" not in second


def test_a_pull_request_from_a_fork_gets_its_table_in_the_log(repository: Repository) -> None:
    repository.gh.write_text(FORK)
    repository.compared(1e6)
    status, said = repository.run(COUNT=COPY)
    assert status == 0
    assert "logical_bytes" in said
    assert "no comment was written" in said


def test_a_limit_that_is_unknown_fails(repository: Repository) -> None:
    repository.compared(1e6)
    status, said = repository.run(COUNT=COPY, LIMITS="logical_byte:1%")
    assert status == 2
    assert "logical_byte" in said


@pytest.mark.slow
def test_a_change_that_moves_equal_bytes_passes(repository: Repository) -> None:
    repository.commit(SCRIPT.replace("lr=0.1", "lr=0.2"))
    status, said = repository.run(PULL_REQUEST="")
    assert status == 0, said
    assert "logical_bytes" in said
    assert not repository.comments


def installed(repository: Repository, folder: str) -> dict[str, str]:
    """Put a package into a folder, and commit it with a greater number. Return how it is counted.

    Like an installed package, the package of the head comes last on Python's path.
    """
    package = repository.place / folder / "mine"
    package.mkdir(parents=True)
    (repository.place / "run.json").write_text(run_of([HOLE], metric="logical_bytes"))
    for moved in (1e6, 6e6):
        (package / "__init__.py").write_text(f"MOVED = {moved}\n")
        repository.commit(PACKAGE)
        repository.base = repository.git("rev-parse", f"HEAD~{int(moved > 1e6)}").strip()
    path = f"{ROOT}:{package.parent}"
    return {"COUNT": f"'{sys.executable}' train.py {{json}}", "PYTHONPATH": path}


@pytest.mark.parametrize("folder", ["", "src"])
def test_the_base_is_counted_with_its_own_code_although_the_head_is_installed(
    repository: Repository, folder: str
) -> None:
    status, said = repository.run(**installed(repository, folder))
    assert status == 1
    assert "+500.00%  1% exceeded" in said


def test_a_base_that_imports_the_heads_code_is_not_judged(repository: Repository) -> None:
    given = installed(repository, "packages/one")
    head = repository.place / "packages/one/mine/__init__.py"
    status, said = repository.run(**given)
    assert status == 1
    assert f"The base imported code of this change, so nothing was judged: {head}" in said
    status, said = repository.run(
        **given | {"COUNT": f"PYTHONPATH=packages/one:{ROOT} {given['COUNT']}"}
    )
    assert "+500.00%  1% exceeded" in said


def test_a_base_that_imports_a_copy_in_site_packages_is_not_judged(
    repository: Repository, tmp_path: Path
) -> None:
    given = installed(repository, "packages/one")
    site = tmp_path / "site-packages"
    shutil.copytree(repository.place / "packages/one", site)
    about = site / "mine-1.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("mine/__init__.py,,\n")
    (about / "direct_url.json").write_text('{"dir_info": {}, "url": "file:///project"}')
    status, said = repository.run(**given | {"PYTHONPATH": f"{ROOT}:{site}"})
    assert status == 1
    assert f"nothing was judged: {site}/mine/__init__.py" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"LIMITS": " \n"}, "The input limits is empty"),
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
