"""The name of a class of a test, as a command line would have it."""

from __future__ import annotations


def target(named: type) -> str:
    """The import target of a class."""
    return f"{named.__module__}:{named.__qualname__}"
