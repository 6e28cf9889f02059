"""Programs of tests' own, which stand in for real ones."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def program(path: Path, python: str | Path) -> Path:
    """Write an executable that runs Python: a text, or a file that exists.

    By way of a shell, because the interpreter's path may have a blank in it or be longer than
    the first line of a script may be.
    """
    what = [str(python)] if isinstance(python, Path) else ["-c", python]
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *what])} "$@"\n', "utf-8")
    path.chmod(0o755)
    return path
