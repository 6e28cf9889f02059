"""Commits of a repository: their order, and a place of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from dpbench.core.errors import ConfigurationError
from dpbench.results.conditions import git

Place = tuple[Path, list[Path]]
"""A command's working directory, and what comes first on its PYTHONPATH."""


def git_here(*words: str) -> str:
    """What git prints here, without running hooks; `ConfigurationError` if it fails."""
    if (said := git(Path(), "-c", "core.hooksPath=/dev/null", *words)) is None:
        raise ConfigurationError(f"this failed: git {' '.join(words)}")
    return said.decode(errors="replace").strip()


def ends(text: str) -> list[str]:
    """The hashes of ``GOOD..BAD``, whose empty end is HEAD; GOOD must be an ancestor of BAD."""
    good, _, bad = text.partition("..")
    said = git(Path(), "rev-list", "--no-walk=unsorted", good or "HEAD", bad or "HEAD")
    hashes = (said or b"").decode().split()
    if len(hashes) != 2 or git_here("rev-list", "-1", f"{hashes[1]}..{hashes[0]}"):
        raise ConfigurationError(f"git finds no range {text!r} here; write OLDER..NEWER commits")
    return hashes


def about_commit(name: str) -> str:
    """The author date and the subject of a commit."""
    return git_here("show", "--no-patch", "--date=format:%F %H:%M", "--format=%ad  %s", name)


class Commits:
    """The commits of ``GOOD..BAD``; their worktrees are made in a folder."""

    def __init__(self, text: str, folder: Path) -> None:
        self.good, self.bad = ends(text)
        self._folder, self._below = folder, git_here("rev-parse", "--show-prefix")
        self.about = about_commit

    def between(self, good: Sequence[str], bad: str) -> list[str]:
        """The ancestors of a bad one that are none of good ones, the best to try first."""
        lines = git_here("rev-list", "--bisect-all", bad, "--not", *good).splitlines()
        return [commit for commit in (line.split()[0] for line in lines) if commit != bad]

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A worktree of a commit, removed afterwards."""
        tree = self._folder / name
        try:
            git_here("worktree", "add", "--detach", str(tree), name)
            yield tree / self._below, [tree, tree / "src"]
        finally:
            rmtree(tree, ignore_errors=True)  # git would keep one that was not finished
            git(Path(), "worktree", "remove", "--force", "--force", str(tree))
