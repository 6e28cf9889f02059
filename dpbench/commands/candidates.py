"""The candidates of a bisection: commits of a repository, or released versions of a package.

`Commits` and `Releases` order the candidates, and make a folder in which a command runs with one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, locked
from dpbench.launch.processes import run
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
        self.describe = describe_commit

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


class Releases:
    """The released versions of a package in ``NAME==LOW..HIGH``. They are installed in a folder."""

    def __init__(self, text: str, folder: Path) -> None:
        try:
            wanted = Requirement(re.sub(r"==(.+?)\.\.", r">=\1,<=", text))
        except InvalidRequirement as error:
            raise ConfigurationError(f"package {text!r}: write NAME==LOW..HIGH") from error
        listed = pip("index", "versions", wanted.name).partition("Available versions: ")[2]
        known = sorted(re.findall(r"[^\s,]+", listed.partition("\n")[0]), key=Version)
        self._names = [*wanted.specifier.filter(known)]
        if len(self._names) < 2:
            raise ConfigurationError(
                f"{text!r} must contain at least two of the releases {', '.join(known)}"
            )
        self.good, self.bad = self._names[0], self._names[-1]
        self._folder, self._package, self._needed = folder, wanted.name, dict[str, list[str]]()

    def between(self, good: Sequence[str], bad: str) -> list[str]:
        """Return the versions between the last ``good`` and ``bad``, from the middle outwards."""
        first, end = max(map(self._names.index, good)), self._names.index(bad)
        places = sorted(range(first + 1, end), key=lambda place: abs(2 * place - first - end))
        return [self._names[place] for place in places]

    def describe(self, name: str) -> str:
        """Return the packages that pip installed for this version but not for the good version."""
        known = [] if name == self.good else self._needed[self.good]
        return " ".join(n for n in self._needed.get(name, ()) if n not in known) or "as installed"

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """Make a folder with a version and the dependencies that are not installed here."""
        folder, report = self._folder / name, self._folder / "report.json"
        pip("install", "--dry-run", "--report", str(report), f"{self._package}=={name}")
        found = [item["metadata"] for item in json.loads(report.read_bytes())["install"]]
        self._needed[name] = [f"{each['name']}=={each['version']}" for each in found]
        if found:
            pip("install", "--no-deps", "--target", str(folder), *self._needed[name])
        yield Path(), [folder]
        rmtree(folder, ignore_errors=True)


def pip(*words: str) -> str:
    """Run pip for this Python, and return its output. Raise an error if pip fails."""
    program = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    code, output = run([*program, *words], timeout=None)
    if code:
        raise ConfigurationError(f"pip {words[0]}: {last_line(output)}")
    return output
