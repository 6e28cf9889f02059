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


PROGRAM = "#!/bin/sh\ntouch '{}'\ncat\n"


@needs_git
@pytest.mark.parametrize(
    "settings",
    [
        {"core.fsmonitor": "{}"},
        {"filter.evil.clean": "{}", "filter.evil.required": "true"},
        {"filter.evil.process": "{}"},
        {"diff.external": "{}"},
        {"diff.evil.textconv": "{}"},
        {"diff.evil.command": "{}"},
    ],
    ids=lambda settings: ",".join(settings),
)
@pytest.mark.parametrize("own_file", [False, True])
def test_no_program_that_the_checkout_names_is_run(
    project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, str],
    own_file: bool,
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    program = outside / "program"
    program.write_text(PROGRAM.format(outside / "executed"))
    program.chmod(0o755)
    if own_file:  # which the checkout's own settings include
        git(project, "config", "include.path", "../more.cfg")
    place = ["--file", str(project / "more.cfg")] if own_file else ["--local"]
    for name, value in settings.items():
        git(project, "config", *place, name, value.format(program))
    (project / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
    (project / "trainer.py").write_text("x = 2\n")
    state = code_state(project)
    assert state is not None
    assert state["dirty"]
    assert not (outside / "executed").exists()


@needs_git
def test_no_program_that_a_submodule_names_is_run(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    inner = outside / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "file").touch()
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "first")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "inner")
    git(project, "commit", "-qm", "with a submodule")
    program = outside / "program"
    program.write_text(PROGRAM.format(outside / "executed"))
    program.chmod(0o755)
    git(project / "inner", "config", "core.fsmonitor", str(program))
    assert code_state(project)
    assert not (outside / "executed").exists()
    seen = set()
    for text in ("x", "y"):
        (project / "inner" / "file").write_text(text)
        state = code_state(project)
        assert state is not None
        assert state["dirty"]
        seen.add(state["changes"])
    assert len(seen) == 2
    assert not (outside / "executed").exists()
    git(project / "inner", "-c", "core.fsmonitor=false", "commit", "-aqm", "second")
    state = code_state(project)
    assert state is not None
    assert state["dirty"], "another commit of a submodule is other code"


@needs_git
def test_a_submodule_that_is_not_there_changes_nothing(project: Path) -> None:
    commit = "1" * 40
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{commit},inner")
    git(project, "commit", "-qm", "with a submodule")
    (project / "inner").mkdir(exist_ok=True)
    state = code_state(project)
    assert state is not None
    assert not state["dirty"]


@needs_git
def test_a_filter_of_the_users_own_is_used(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of Git LFS: without it all its files would seem to be changed."""
    settings = project.parent / "settings"
    settings.write_text('[filter "upper"]\n\tclean = tr a-z A-Z\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    (project / ".gitattributes").write_text("*.txt filter=upper\n")
    (project / "text.txt").write_text("abc")
    git(project, "add", ".")
    git(project, "commit", "-qm", "filtered")
    os.utime(project / "text.txt", (1, 1))
    state = code_state(project)
    assert state is not None
    assert not state["dirty"]
