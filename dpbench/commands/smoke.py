"""Check that every trainer trains, on a tiny model.

Trains two steps of a tiny model with each trainer and says whether it worked. The exit code is
0 if every trainer did.

Examples:
  dpbench smoke
  dpbench smoke --trainer dpsgd --trainer mypackage.trainers:MyTrainer
"""

from __future__ import annotations

import argparse

from dpbench.case import Case
from dpbench.registry import TRAINERS, resolve
from dpbench.settings import AXIS_HELP, declare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    declare(parser.add_argument, "trainer", help=AXIS_HELP["trainer"])
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu"
    )


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.process.build import smoke_test

    failed = 0
    for trainer in options.trainer or list(TRAINERS):
        case = resolve(Case(trainer, batch_size=4, seq_len=32, model_size="tiny"))
        name = TRAINERS[trainer].__name__
        try:
            smoke_test(case, device=options.device)
        except Exception as error:  # a smoke test reports whatever broke
            failed += 1
            print(f"[TEST FAILED] {name}: {type(error).__name__}: {error}")
        else:
            print(f"[TEST OK] {name} passed local test.")
    return 1 if failed else 0
