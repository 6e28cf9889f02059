"""Commits of a repository: their order in a bisection, and folders in which a command runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, locked
from dpbench.results.conditions import git

PREFIX, LOCK = "dpbench-bisect-", "lock"
"""The first part of the name of a bisection's folder, and a file in it, which is locked while the
bisection lives."""

Place = tuple[Path, list[Path]]
"""A command's working directory, and the first entries of its PYTHONPATH."""


def last_line(output: str) -> str:
    """Return the last line that a program printed."""
    return output.strip().rpartition("\n")[2]


def git_output(*words: str, fetches: bool = False) -> str:
    """Run git here, and return its output. Raise an error if git fails."""
    if (output := git(Path(), *words, fetches=fetches)) is None:
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


def remove_worktree(tree: Path) -> None:
    """Remove a worktree, which need not be finished or exist."""
    rmtree(tree, ignore_errors=True)  # git does not remove an unfinished worktree
    git(Path(), "worktree", "remove", "--force", "--force", str(tree))


def remove_abandoned() -> None:
    """Remove the worktrees of bisections that were killed."""
    for line in git_output("worktree", "list", "--porcelain").splitlines():
        tree = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and tree.parent.name.startswith(PREFIX):
            with suppress(Locked), locked(tree.parent / LOCK, wait=False):
                remove_worktree(tree)
                rmtree(tree.parent, ignore_errors=True)


class Commits:
    """The commits of ``GOOD..BAD``. Their worktrees are made in a folder."""

    def __init__(self, text: str, folder: Path) -> None:
        self.good, self.bad = range_ends(text)
        remove_abandoned()
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
            # A partial clone fetches the files of a commit here.
            git_output("worktree", "add", "--detach", str(tree), name, fetches=True)
            yield tree / self._below, [tree, tree / "src"]
        finally:
            remove_worktree(tree)
