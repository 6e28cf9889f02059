"""Name classes of tests as a command line does."""

from __future__ import annotations


def target(named: type) -> str:
    """Return ``module:Class`` for a class."""
    return f"{named.__module__}:{named.__qualname__}"
