"""Commits of a repository: their order in a bisection, and folders in which a command runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from dpbench.core.errors import ConfigurationError
from dpbench.results.conditions import git

Place = tuple[Path, list[Path]]
"""A command's working directory, and the first entries of its PYTHONPATH."""


def last_line(output: str) -> str:
    """Return the last line that a program printed."""
    return output.strip().rpartition("\n")[2]


def git_output(*words: str) -> str:
    """Run git here without hooks, and return its output. Raise an error if git fails."""
    if (output := git(Path(), "-c", "core.hooksPath=/dev/null", *words)) is None:
        raise ConfigurationError(f"this command failed: git {' '.join(words)}")
    return output.decode(errors="replace").strip()


def range_ends(text: str) -> list[str]:
    """Return the hashes of GOOD and BAD in ``GOOD..BAD``. An end that is left out is HEAD.

    Raise an error if GOOD has a commit that BAD does not contain.
    """
    good, _, bad = text.partition("..")
    output = git(Path(), "rev-list", "--no-walk=unsorted", good or "HEAD", bad or "HEAD")
    hashes = (output or b"").decode().split()
    if len(hashes) != 2 or git_output("rev-list", "-1", f"{hashes[1]}..{hashes[0]}"):
        raise ConfigurationError(
            f"git finds no range {text!r} here: write OLDER..NEWER, two commits of this repository"
        )
    return hashes


def describe_commit(name: str) -> str:
    """Return the author date and the subject of a commit."""
    return git_output("show", "--no-patch", "--date=format:%F %H:%M", "--format=%ad  %s", name)


class Commits:
    """The commits of ``GOOD..BAD``. Their worktrees are made in a folder."""

    def __init__(self, text: str, folder: Path) -> None:
        self.good, self.bad = range_ends(text)
        self._folder, self._below = folder, git_output("rev-parse", "--show-prefix")

    def between(self, good: Sequence[str], bad: str) -> list[str]:
        """Return the commits between the ``good`` commits and ``bad``, in the best order to try.

        These commits are the ancestors of ``bad`` that are not in the history of a ``good`` commit.
        """
        lines = git_output("rev-list", "--bisect-all", bad, "--not", *good).splitlines()
        return [commit for commit in (line.split()[0] for line in lines) if commit != bad]

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """Make a worktree of a commit, and remove the worktree afterwards."""
        tree = self._folder / name
        try:
            git_output("worktree", "add", "--detach", str(tree), name)
            yield tree / self._below, [tree, tree / "src"]
        finally:
            rmtree(tree, ignore_errors=True)  # git does not remove an unfinished worktree
            git(Path(), "worktree", "remove", "--force", "--force", str(tree))
