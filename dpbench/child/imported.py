"""Finds imported code from outside installed packages: a trainer's, a test's."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

INSTALLED = {"site-packages", "dist-packages", ".triton"}
"""The names of folders of installed packages, and of the kernels that Triton compiles."""


def imported_files() -> dict[str, str]:
    """The files of these modules, each with its `digest`, since changed code may change numbers.

    Code that PyTorch's compiler writes and loads has no import specification.
    """
    known = [Path(sysconfig.get_paths()["stdlib"]), Path(__file__).parents[1]]
    files: dict[str, str] = {}
    for module in [*sys.modules.values()]:
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        path = Path(str(origin))
        is_installed = any(path.is_relative_to(folder) for folder in known)
        if path.is_absolute() and INSTALLED.isdisjoint(path.parts) and not is_installed:
            files[str(path)] = digest(path)
    return files


def digest(path: Path) -> str:
    """A digest of a file's content; empty if it cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return ""
