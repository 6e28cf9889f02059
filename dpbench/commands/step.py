"""Run one case in this process and print one JSON line.

Builds the case, warms up, runs the active steps. This is the process that instruments measure;
by hand it is the quickest way to try a trainer. The line holds seconds by phase for each active
step, and peak memory in bytes (CUDA only).

Examples:
  dpbench step --trainer dpsgd --batch-size 4 --seq-len 32 --model-size tiny --device cpu
  dpbench step --trainer dpsgd_ghost --batch-size 8 --seq-len 256 --model-size 1b
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from dpbench.case import ATTENTIONS, PRECISIONS, Case
from dpbench.commands.options import MODEL_HELP, SIZE_HELP, TRAINER_HELP, add_steps, one_of
from dpbench.errors import DpbenchError
from dpbench.instruments.child import Steps
from dpbench.instruments.timing import Timing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("--trainer", required=True, help=TRAINER_HELP)
    parser.add_argument("--batch-size", type=int, default=8, help="examples (default 8)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--model-size", default="1b", help=SIZE_HELP)
    parser.add_argument("--precision", default="fp32", help=one_of(PRECISIONS))
    parser.add_argument("--attention", default="sdpa", help=one_of(ATTENTIONS))
    parser.add_argument("--model", default="simple", help=MODEL_HELP)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_steps(parser, "a process's", Timing.steps)
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="mark phases as NVTX ranges for a profiler, and take no times",
    )


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    case = Case(
        trainer=options.trainer,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        model_size=options.model_size,
        precision=options.precision,
        attention=options.attention,
        model=options.model,
    )
    Steps(options.warmup, options.active)  # refuses what makes no sense
    from dpbench.step import run_case

    try:
        record = run_case(
            case,
            device=options.device,
            warmup=options.warmup,
            active=options.active,
            nvtx=options.nvtx,
        )
    except Exception as error:  # whoever started this process learns why from the record
        kind = type(error).__name__
        first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
        message = str(error) if isinstance(error, DpbenchError) else f"{kind}: {first_line}"
        _print_record(error={"kind": kind, "message": message})
        raise
    _print_record(**record)
    return 0


def _print_record(**record: Any) -> None:
    from dpbench import __version__

    print(json.dumps({"dpbench": __version__, **record}), flush=True)
