"""Measure the ceilings of a GPU: the bandwidth of a copy, and the FLOP/s of a matrix product.

    python bench/ceilings.py > ceilings.json

times a copy of a buffer far larger than the L2 cache, and a large matrix product at each precision.
Meanwhile other dpbench processes wait for this GPU. ``dpbench show --roofline FILE`` and ``--time
FILE`` use the measured numbers instead of the numbers in the GPU's data sheet.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from dpbench import ConfigurationError
from dpbench.child.build import pick_device
from dpbench.child.case import with_gpus_locked
from dpbench.core import gpu
from dpbench.results.rows import SCHEMA

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
}
"""Dtypes of the multiplied matrices, by the name of the precision."""


def measure_ceilings(
    device: str = "cuda",
    *,
    copy_bytes: int = 4 * 2**30,
    matrix: int = 8192,
    seconds: float = 0.5,
) -> dict[str, Any]:
    """Measure a device. Meanwhile other dpbench processes wait for this device.

    Args:
        device: ``auto``, ``cuda`` or ``cpu``.
        copy_bytes: size of the buffer to copy. On a GPU, at most a quarter of the free memory is
            used. The default is about 32 times the largest known L2 cache (126 MB).
        matrix: number of rows and of columns of the matrices.
        seconds: time for which each measurement is repeated at least. The result is the median.

    Returns:
        The part ``ceilings`` of a file that `dpbench.results.roofline.read_ceilings` reads.
    """
    target = pick_device(device)
    card = gpu.visible_gpus()[0] if target.type == "cuda" else None
    with with_gpus_locked(target, "ceilings"):
        if card:
            copy_bytes = min(copy_bytes, torch.cuda.mem_get_info()[0] // 4)
        return {
            "device": card.name if card else target.type,
            "bandwidth": _copy(copy_bytes, target, seconds),
            "copy_bytes": copy_bytes,
            "flops": {name: _product(name, target, matrix, seconds) for name in DTYPES},
            "matrix": matrix,
            "torch": torch.__version__,
        }


def _copy(size: int, device: torch.device, seconds: float) -> float:
    """Return the bytes that a copy on the device reads and writes per second."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    copy = torch.empty_like(source)
    return 2 * size / _median(lambda: copy.copy_(source), seconds)


def _product(precision: str, device: torch.device, side: int, seconds: float) -> float:
    """Return the FLOP/s of a product of two square matrices. A multiply-add is two operations."""
    dtype = DTYPES[precision]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(left)
        return 2 * side**3 / _median(lambda: torch.mm(left, right, out=out), seconds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _median(function: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call, after a warm-up and with synchronization of the GPU."""
    from torch.utils.benchmark import Timer  # imports setuptools

    timer = Timer("function()", globals={"function": function})
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def main() -> int:
    """Measure the GPU and print the numbers as JSON."""
    try:
        gpu.require_gpu()
        os.environ.update(gpu.child_environment())  # before CUDA numbers the GPUs
        measured = measure_ceilings()
    except ConfigurationError as error:
        print(f"ceilings.py: {error}", file=sys.stderr)
        return 2
    # A saved run without rows, because no case was measured
    print(json.dumps({"schema": SCHEMA, "rows": [], "ceilings": measured}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
