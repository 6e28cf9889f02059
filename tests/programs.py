"""Executables that tests use in place of real programs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from dpbench.results.outcome import Outcome


def program(path: Path, python: str | Path) -> Path:
    """Write an executable that runs Python code, or an existing file.

    A shell starts the interpreter, because the interpreter's path may contain a space or be too
    long for the first line of a script.
    """
    what = [str(python)] if isinstance(python, Path) else ["-c", python]
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *what])} "$@"\n', "utf-8")
    path.chmod(0o755)
    return path


def reports(outcome: Outcome) -> str:
    """The text of a program that reports an outcome, as a measured process does."""
    return (
        "import json; from dpbench.child.messages import report; "
        "from dpbench.results.outcome import Outcome; "
        f"report(Outcome.from_json(json.loads({json.dumps(outcome.as_json())!r})))"
    )
