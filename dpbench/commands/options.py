"""What several commands say and take."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from dpbench.case import MODEL_SIZES
from dpbench.instruments.child import Steps
from dpbench.registry import MODELS, TRAINERS


def add_steps(
    parser: argparse._ActionsContainer, whose: str, steps: Steps, prefix: str = ""
) -> None:
    """Declare how many steps warm up, and how many count, under options with a prefix."""
    for name, default in (("warmup", steps.warmup), ("active", steps.active)):
        parser.add_argument(
            f"--{prefix}{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{whose} {name} steps (default {default})",
        )


def one_of(names: Iterable[str]) -> str:
    """Names for a help text."""
    return ", ".join(names)


TRAINER_HELP = f"{one_of(TRAINERS)}, their class names, or package.module:Class"
SIZE_HELP = f"{one_of(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS (default 1b)"
MODEL_HELP = f"{one_of(MODELS)}, or package.module:Class"
METRICS_HELP = "names of ours, of nvprof, or ncu counters, separated by commas (default all ours)"
