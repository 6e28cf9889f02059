"""Check that every trainer can train a tiny model.

Each trainer takes two steps on a tiny model, or on a workload of your own. A line for each trainer
says whether the steps worked. The exit code is 0 if they worked for every trainer.

Examples:
  dpbench smoke
  dpbench smoke --trainer dpsgd --trainer mypackage.trainers:MyTrainer
  dpbench smoke --workload mypackage.images:Digits --set image_size=28
"""

from __future__ import annotations

import argparse
from typing import Any

from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError, own_line
from dpbench.core.names import joined, parted
from dpbench.core.option_fields import axis_help
from dpbench.core.registry import TRAINERS
from dpbench.core.settings import declare

SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 32, "model_size": "tiny"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    declare(parser.add_argument, "trainer", help=axis_help("trainer"), dest="trainers")
    add_case(parser, AXES[1:], device="cpu", **SMALL)


def run(options: argparse.Namespace) -> int:
    """Train with each trainer, and print whether that worked."""
    from dpbench.child.build import smoke_test  # imports torch

    failed = 0
    for trainer in options.trainers or list(TRAINERS):
        case = chosen_case(options, **SMALL, trainer=trainer)
        if case.gpus > 1:
            raise ConfigurationError(
                "smoke trains in one process: for several ranks, use dpbench verify or dpbench run"
            )
        TRAINERS.locate(case.trainer)
        name = case.trainer
        try:
            short, parameters = parted(name)
            name = joined(TRAINERS[short].__name__, parameters)
            smoke_test(case, device=options.device)
        except Exception as error:  # report any error
            failed += 1
            where = own_line(error.__traceback__)
            print(f"[TEST FAILED] {name}: {type(error).__name__}: {error}{where}")
        else:
            print(f"[TEST OK] {name} passed local test.")
    return 1 if failed else 0
