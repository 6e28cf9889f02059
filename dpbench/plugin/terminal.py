"""The terminal of a session, for what a person wants to see while a test still runs."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def open_terminal() -> TextIO | None:
    """A second way to standard error, for as long as the first is caught; None without any.

    To be opened while pytest catches nothing, as when it is being configured.
    """
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
    except (AttributeError, OSError, ValueError):  # closed, or something that has no descriptor
        return None
