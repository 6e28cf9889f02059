"""Whether a case can fit a GPU, from its predicted peak memory, before it costs GPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.gpu import Gpu
from dpbench.instruments import child
from dpbench.instruments.base import CaseFailed, InstrumentError
from dpbench.registry import MODELS, TRAINERS, arguments
from dpbench.results.rows import STEP

COUNTING_SECONDS = 60.0
"""After this, an outside trainer is taken not to be countable; a 1b case takes up to 7 s."""


class DoesNotFit(InstrumentError):
    """The case needs more memory than the GPU has; it was not started."""

    remedy: ClassVar[str] = "use a smaller case or a larger GPU, or try anyway"


def check_fits(case: Case, gpu: Gpu | None) -> None:
    """Refuse a case whose tensors alone need more than the GPU's whole memory.

    The peak is counted without hardware (`dpbench.instruments.logical`); on an NVIDIA H200 it
    came within 1.1 % of what PyTorch's allocator had handed out. The CUDA context and
    fragmentation come on top, so a case that passes may still run out of memory.

    Args:
        case: what shall run.
        gpu: where; without one, or if it does not say how much memory it has, nothing is refused.

    Raises:
        DoesNotFit: it cannot; the message says what it needs and what there is.
    """
    if gpu is None or gpu.memory_bytes is None:
        return
    try:
        needed = predicted_peak_bytes(case)
    except DpbenchError:  # what cannot be counted may run all the same
        return
    if needed > gpu.memory_bytes:
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needed / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )


def predicted_peak_bytes(case: Case) -> int:
    """The most bytes that the tensors of a step take at once.

    An outside trainer or model may hang or end its process, so it is counted in one of its own.

    Raises:
        DpbenchError: the case cannot be counted.
    """
    if TRAINERS.is_builtin(case.trainer) and MODELS.is_builtin(case.model):
        from dpbench.instruments.logical.instrument import Logical  # loads torch

        rows = [row.as_row() for row in Logical().measure(case)]
    else:
        rows = _rows_of_own_process(case)
    return next(
        int(row["value"])
        for row in rows
        if (row["phase"], row["metric"]) == (STEP, "peak_memory_bytes")
    )


def _rows_of_own_process(case: Case) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="dpbench-") as directory:
        found = Path(directory) / "counted.json"
        command = [sys.executable, "-m", "dpbench", "run", "--instrument", "logical"]
        try:
            subprocess.run(
                [*command, *arguments(case), "--json", str(found)],
                env={**os.environ, **child.environment(case), "GITHUB_STEP_SUMMARY": ""},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=COUNTING_SECONDS,
            )
            rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))["rows"]
        except (subprocess.SubprocessError, OSError) as error:
            raise CaseFailed(f"{case.id}: its peak memory could not be counted: {error}") from error
    return rows
