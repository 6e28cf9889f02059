"""Check that every trainer trains, on a tiny model.

Trains two steps of a tiny model with each trainer and says whether it worked. The exit code is
0 if every trainer did.

Examples:
  dpbench smoke
  dpbench smoke --trainer dpsgd --trainer mypackage.trainers:MyTrainer
"""

from __future__ import annotations

import argparse
import math

from dpbench.case import Case
from dpbench.options import AXIS_ARGUMENTS
from dpbench.registry import TRAINERS, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("--trainer", action="append", **AXIS_ARGUMENTS["trainer"])
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu"
    )


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    failed = 0
    for trainer in options.trainer or list(TRAINERS):
        case = resolve(Case(trainer, batch_size=4, seq_len=32, model_size="tiny"))
        name = TRAINERS[trainer].__name__
        try:
            _train_two_steps(case, options.device)
        except Exception as error:  # a smoke test reports whatever broke
            failed += 1
            print(f"[TEST FAILED] {name}: {type(error).__name__}: {error}")
        else:
            print(f"[TEST OK] {name} passed local test.")
    return 1 if failed else 0


def _train_two_steps(case: Case, device: str) -> None:
    """Raise whatever goes wrong, or shows that nothing was trained."""
    import torch

    from dpbench.process.build import build
    from dpbench.process.step import pick_device

    trainer, batches = build(case, pick_device(device), num_batches=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    losses = [float(trainer.train_step(batch)) for batch in batches]
    if not all(map(math.isfinite, losses)):
        raise AssertionError(f"the loss is not finite: {losses}")
    if all(map(torch.equal, before, trainer.model.parameters())):
        raise AssertionError("no parameter changed in two steps")
