"""What tests assert of a verdict."""

from __future__ import annotations

from typing import Any

from dpbench.results.compare import Verdict


def failures(verdict: Verdict) -> list[Any]:
    """Return what fails a session: exceeded limits, and limits that could not be checked."""
    return [*verdict.regressions, *verdict.unjudged]
