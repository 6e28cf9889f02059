"""Which code was measured, as git knows it."""

from __future__ import annotations

import hashlib
import subprocess
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
    root = Path(top.decode().strip())
    digest = hashlib.sha256(difference := _git(root, "diff", "--binary", "HEAD") or b"")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.toml")
    names = sorted(name for name in (untracked or b"").decode().split("\0") if name)
    for name in names:
        digest.update(name.encode())
        digest.update((root / name).read_bytes())
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
