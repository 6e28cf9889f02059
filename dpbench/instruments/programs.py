"""What a profiler's program says of itself."""

from __future__ import annotations

import re
from functools import cache

from dpbench.instruments.processes import run

ANSWER_SECONDS = 30.0  # a program has to answer a question; it takes a second or two


@cache
def version_of(path: str) -> str:
    """The version that an ``ncu`` or ``nsys`` says it has, e.g. ``2025.3.1``, or ``unknown``."""
    code, answer = run([path, "--version"], timeout=ANSWER_SECONDS)
    match = None if code else re.search(r"[Vv]ersion (\d+\.\d+\.\d+)", answer)
    return match[1] if match else "unknown"  # made for another machine, say, or it hangs
