"""Several GPUs: how many xdist workers there should be, and which GPU each of them uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dpbench.gpu import visible_gpus
from dpbench.grid import Grid

WORKERS_PER_GPU = 2
"""One sets up while the other measures; a third would only wait for the GPU's lock."""


def useful_workers(grid: Grid) -> int:
    """How many workers ``-n auto`` means: two a GPU, and no more than there are cases."""
    return min(WORKERS_PER_GPU * len(visible_gpus()), len(grid.cases()))


def share_gpus(specs: Sequence[Any]) -> None:
    """Give each worker on this machine one GPU; a replacement of a crashed one keeps it."""
    gpus = visible_names()
    local = [spec for spec in specs if spec.popen]
    for number, spec in enumerate(local if gpus else []):
        spec.env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def visible_names() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process may use.

    Entries of the caller's own list if there is one, for it may pick some GPUs or slices of one;
    otherwise UUIDs, which do not depend on how CUDA numbers GPUs.
    """
    gpus = visible_gpus()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return [gpu.uuid for gpu in gpus]
    return [entry.strip() for entry in asked.split(",")][: len(gpus)]
