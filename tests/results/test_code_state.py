"""Which code was measured."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dpbench.results.conditions import code_state

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "trainer.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@needs_git
def test_committed_code_is_clean_whatever_results_lie_around(project: Path) -> None:
    (project / ".dpbench").mkdir()
    (project / ".dpbench" / "0001_run.json").write_text("{}")
    state = code_state(project)
    assert state is not None
    assert (state["dirty"], state["changes"]) == (False, None)
    assert len(state["commit"]) == 40


@needs_git
def test_two_different_changes_are_told_apart_also_in_untracked_code(project: Path) -> None:
    seen = []
    for name, text in (("trainer.py", "x = 2\n"), ("trainer.py", "x = 3\n"), ("own.py", "y = 1")):
        (project / name).write_text(text)
        state = code_state(project)
        assert state is not None
        assert state["dirty"]
        seen.append(state["changes"])
    assert len(set(seen)) == 3
    assert code_state(project) == state


@needs_git
def test_an_editors_lock_is_no_code_and_names_may_be_in_any_encoding(project: Path) -> None:
    (project / ".#trainer.py").symlink_to("somebody@host.1234")
    state = code_state(project)
    assert state is not None
    assert not state["dirty"]
    (project / os.fsdecode(b"caf\xe9.py")).write_text("z = 1")
    assert (code_state(project) or {})["dirty"]


@needs_git
def test_a_difference_tool_of_the_users_own_changes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "trainer.py").write_text("x = 2\n")
    state = code_state(project)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "true")  # which never sees any
    assert code_state(project) == state


def test_directory_without_git_has_no_code_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # it may be in a checkout
    assert code_state(tmp_path) is None


@needs_git
def test_changes_and_commits_in_a_submodule_are_other_code(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    inner = tmp_path_factory.mktemp("inner")
    git(inner, "init", "-q")
    (inner / "file").touch()
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "first")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "inner")
    git(project, "commit", "-qm", "with a submodule")
    ran = project / ".git" / "ran"
    git(project / "inner", "config", "diff.external", f"touch '{ran}'; true")
    seen = set()
    for text in ("x", "y"):
        (project / "inner" / "file").write_text(text)
        state = code_state(project)
        assert state is not None
        assert state["dirty"]
        seen.add(state["changes"])
    assert len(seen) == 2
    assert not ran.exists()
    git(project / "inner", "commit", "-aqm", "second")
    state = code_state(project)
    assert state is not None
    assert state["dirty"]


@needs_git
def test_a_submodule_that_is_not_there_changes_nothing(project: Path) -> None:
    commit = "1" * 40
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{commit},inner")
    git(project, "commit", "-qm", "with a submodule")
    (project / "inner").mkdir(exist_ok=True)
    state = code_state(project)
    assert state is not None
    assert not state["dirty"]
