"""Measure what this GPU reaches, beside its data sheet.

Times a copy far larger than the L2 cache, and a large matrix product at each precision, while
no other dpbench process measures on this GPU. The JSON file serves dpbench roofline as roofs.

Examples:
  dpbench ceilings
  dpbench ceilings --json ceilings.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dpbench.files import check_writable_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="for dpbench roofline --ceilings")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.files import write_text
    from dpbench.gpu import child_environment, require_gpu
    from dpbench.process.ceilings import measure_ceilings
    from dpbench.results.roofline import Ceilings
    from dpbench.show.kernels import ceilings_table

    require_gpu()
    if options.json:
        check_writable_file(options.json)
    os.environ.update(child_environment())  # before CUDA numbers the GPUs
    ceilings = Ceilings(**measure_ceilings())
    print(ceilings_table(ceilings).as_text())
    if options.json:
        write_text(options.json, ceilings.as_json())
    return 0
