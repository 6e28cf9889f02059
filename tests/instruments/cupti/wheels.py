"""The libcupti and the headers of the PyPI wheels nvidia-cuda-cupti and nvidia-cuda-cupti-cu12."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters import Driver, candidate_folders
from dpbench.instruments.cupti.library import Library, open_in

HEADERS = [
    folder
    for site in filter(None, sys.path)
    for folder in sorted(Path(site, "nvidia").glob("*/include"))
    if (folder / "cupti_range_profiler.h").is_file()
]


@cache
def usable_library() -> Library | None:
    """The first library that answers here; from 13.2 on they do so only beside a driver."""
    for folder in candidate_folders():
        try:
            return open_in(folder, Driver.load())
        except InstrumentError:
            continue
    return None
