"""Check that a trainer clips and adds noise as it says, parameter by parameter.

Without noise, what each step takes off the parameters must be the mean of the clipped gradients of
the examples, computed one example at a time: with a threshold that half of them exceed and with one
that all do, for the batch as a whole, in micro-batches, and in parts of one example. Noise must be
normal also in its tails, of deviation σC/B for several σ, C and B whatever the gradients are, and
not repeat anywhere, moved, mirrored or in another order, between elements, parameters, steps, runs
and processes: right noise fails with a chance of at most 1e-6. On a linear layer, 240 steps of
noise are drawn, and an example must be clipped whose tokens cancel in products of them, or whose
norm is no number. Over ranks all this holds for the batch of all together.

What differs is said in a line for each parameter. The exit code is 1 if anything is wrong, 2 if the
case is refused. Not found is what begins after 240 steps (noise that ends), what the trainer keeps
outside of its model, noise that only its author can predict, and in 16-bit numbers, noise that
comes again in another order.

Examples:
  dpbench verify --trainer dpsgd
  dpbench verify --trainer mypackage.trainers:MyTrainer --trainable lora:4
  dpbench verify --trainer dpsgd_ghost --parallel fsdp2 --gpus 2
  dpbench verify --trainer book_keeping --workload resnet:depth=18,image_size=32 --batch-size 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dpbench.commands.options import add_case, chosen_case
from dpbench.core import gpu
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, DpbenchError, own_line
from dpbench.core.registry import locate
from dpbench.show.layout import Table

if TYPE_CHECKING:
    from dpbench.verify.check import Check

SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 16, "model_size": "tiny", "micro_batches": 2}
ONE_LINE = 300
"""Columns, so that each check stays one line: names of parameters are long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser, AXES, device="auto", **SMALL)


def run(options: argparse.Namespace) -> int:
    """Print what the checks found; 1 if anything is wrong."""
    case = chosen_case(options, **SMALL)
    locate([case])
    checks = found(case, options.device, processes=True)
    print(as_text(case, checks))
    return 0 if all(check.passed for check in checks) else 1


def found(case: Case, device: str, *, processes: bool = False) -> list[Check]:
    """What the checks found; whatever a trainer fails with is said with its name."""
    from dpbench.child.build import pick_device
    from dpbench.training.refusals import CannotTrain
    from dpbench.verify.checks import verify  # which imports torch

    on_gpu = pick_device(device).type == "cuda"
    card = gpu.visible_gpus()[0] if on_gpu and case.gpus == 1 else None  # ranks take their own
    try:
        # Work beside a measured process would be counted there.
        with gpu.exclusive(card, f"verify {case.id}") if card else nullcontext():
            return verify(case, device, processes=processes)
    except CannotTrain as error:
        raise ConfigurationError(str(error)) from error
    except DpbenchError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
        raise DpbenchError(f"trainer {case.trainer} failed: {words}") from error


def as_text(case: Case, checks: Sequence[Check]) -> str:
    """A table of the checks, and a line for each thing that is wrong."""
    lines = [[check.name, check.verdict, check.far, check.worst] for check in checks]
    headers = ["check", "verdict", "how far", "worst parameter"]
    table = Table(f"verify {case.id}", headers, lines).as_text(ONE_LINE)
    wrong = [f"{check.name}: {line}" for check in checks for line in check.wrong]
    return "\n".join([table, *([""] if wrong else []), *wrong])
