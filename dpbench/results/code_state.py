"""Which code was measured, as git knows it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


def code_state(project: Path) -> dict[str, Any] | None:
    """The commit of the project in a directory, and whether the code differs from it.

    ``changes`` is a digest of what differs: two dirty states with the same digest are the same
    code. Changed tracked files count, and untracked Python and TOML files (an own trainer, a
    grid); results and reports that lie around do not. None where git or a commit is absent.
    """
    commit = _git(project, "rev-parse", "HEAD")
    top = _git(project, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    root = Path(os.fsdecode(top).rstrip("\n"))
    # Git's own difference: a tool that a user has set up may leave out what it takes for equal.
    own = ("--no-ext-diff", "--no-textconv", "--no-color")
    digest = hashlib.sha256(difference := _git(root, "diff", *own, "--binary", "HEAD") or b"")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.toml")
    names = []
    for name in sorted(filter(None, (untracked or b"").split(b"\0"))):
        with suppress(OSError):  # the link by which an editor locks a file leads nowhere
            content = (root / os.fsdecode(name)).read_bytes()
            digest.update(name + content)
            names.append(name)
    dirty = bool(difference or names)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "changes": digest.hexdigest() if dirty else None,
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    """What git prints, or None if it cannot."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
