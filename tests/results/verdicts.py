"""What tests assert of a verdict."""

from __future__ import annotations

from typing import Any

from dpbench.results.gate import Comparison


def failures(verdict: Comparison) -> list[Any]:
    """Return what fails a session: exceeded limits, and limits that could not be checked."""
    return [*verdict.regressions, *verdict.unjudged]
