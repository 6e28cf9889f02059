"""What a bisection tries: commits of a repository, or released versions of a package.

`Commits` and `Releases` order them and make a place where a command runs with each.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from dpbench.core.errors import ConfigurationError
from dpbench.launch.processes import run
from dpbench.results.conditions import git

Place = tuple[Path, list[Path]]
"""A command's working directory, and what comes first on its PYTHONPATH."""


def last_line(said: str) -> str:
    """The last line that a program printed."""
    return said.strip().rpartition("\n")[2]


def git_here(*words: str) -> str:
    """What git prints here, without running hooks; `ConfigurationError` if it fails."""
    if (said := git(Path(), "-c", "core.hooksPath=/dev/null", *words)) is None:
        raise ConfigurationError(f"this failed: git {' '.join(words)}")
    return said.decode(errors="replace").strip()


def range_ends(text: str) -> list[str]:
    """The hashes of ``GOOD..BAD``. An empty end is HEAD. GOOD must be an ancestor of BAD."""
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
        self.good, self.bad = range_ends(text)
        self._folder, self._below = folder, git_here("rev-parse", "--show-prefix")
        self.about = about_commit

    def between(self, good: Sequence[str], bad: str) -> list[str]:
        """The ancestors of ``bad`` that no ``good`` commit contains, the best to try first."""
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
            rmtree(tree, ignore_errors=True)  # git does not remove an unfinished worktree
            git(Path(), "worktree", "remove", "--force", "--force", str(tree))


class Releases:
    """The released versions of a package in ``NAME==LOW..HIGH``, installed in a folder."""

    def __init__(self, text: str, folder: Path) -> None:
        try:
            asked = Requirement(re.sub(r"==(.+?)\.\.", r">=\1,<=", text))
        except InvalidRequirement as error:
            raise ConfigurationError(f"package {text!r}: write NAME==LOW..HIGH") from error
        listed = pip("index", "versions", asked.name).partition("Available versions: ")[2]
        known = sorted(re.findall(r"[^\s,]+", listed.partition("\n")[0]), key=Version)
        self._names = [*asked.specifier.filter(known)]
        if len(self._names) < 2:
            raise ConfigurationError(
                f"{text!r} must hold at least two of the releases {', '.join(known)}"
            )
        self.good, self.bad = self._names[0], self._names[-1]
        self._folder, self._package, self._needed = folder, asked.name, dict[str, list[str]]()

    def between(self, good: Sequence[str], bad: str) -> list[str]:
        """The versions between the last good one and a bad one, those in the middle first."""
        first, end = max(map(self._names.index, good)), self._names.index(bad)
        places = sorted(range(first + 1, end), key=lambda place: abs(2 * place - first - end))
        return [self._names[place] for place in places]

    def about(self, name: str) -> str:
        """The packages that were installed with a version and not with the good one."""
        known = [] if name == self.good else self._needed[self.good]
        return " ".join(n for n in self._needed.get(name, ()) if n not in known) or "as installed"

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A folder with a version and its dependencies, except those that are installed here."""
        folder, report = self._folder / name, self._folder / "report.json"
        pip("install", "--dry-run", "--report", str(report), f"{self._package}=={name}")
        found = [item["metadata"] for item in json.loads(report.read_bytes())["install"]]
        self._needed[name] = [f"{each['name']}=={each['version']}" for each in found]
        if found:
            pip("install", "--no-deps", "--target", str(folder), *self._needed[name])
        yield Path(), [folder]
        rmtree(folder, ignore_errors=True)


def pip(*words: str) -> str:
    """What pip prints for this Python; `ConfigurationError` with its last line if it fails."""
    program = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    code, said = run([*program, *words], timeout=None)
    if code:
        raise ConfigurationError(f"pip {words[0]}: {last_line(said)}")
    return said
