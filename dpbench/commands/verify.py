"""Check that a trainer clips and adds noise as it says, parameter by parameter.

Without noise, what each step takes off the parameters must be the mean of the clipped gradients of
the examples, computed one example at a time: with a threshold that half of them exceed and with one
that all do, for the batch as a whole and in micro-batches. The noise must be normal with deviation
σC/B, and not repeat between elements, parameters, steps, runs or processes: right noise fails with
a chance of at most 1e-6. Over ranks all this holds for the batch of all together. What differs is
said in a line for each parameter. The exit code is 1 if anything is wrong, or was not judged.

Examples:
  dpbench verify --trainer dpsgd
  dpbench verify --trainer mypackage.trainers:MyTrainer --trainable lora:4
  dpbench verify --trainer dpsgd_ghost --parallel fsdp2 --gpus 2
  dpbench verify --trainer book_keeping --workload resnet:depth=18,image_size=32 --batch-size 4
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dpbench import gpu
from dpbench.case import AXES, Case
from dpbench.commands.options import add_case, chosen_case
from dpbench.errors import DpbenchError, own_line
from dpbench.process.command_line import arguments, python_path
from dpbench.registry import locate
from dpbench.show.layout import Table

if TYPE_CHECKING:
    from dpbench.verify.check import Check

SMALL = {"batch_size": 4, "seq_len": 16, "model_size": "tiny", "micro_batches": 2}
ONE_LINE = 300
"""Columns, so that each check stays one line: names of parameters are long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser, AXES, device="auto", **SMALL)
    parser.add_argument("--draw", type=Path, metavar="FILE", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Print what the checks found; 1 if anything is wrong."""
    case = chosen_case(options, **SMALL)
    locate([case])
    if options.draw:
        in_ranks(partial(_draw, options.device, options.draw), case, options.device)
        return 0
    checks = found(case, options.device, partial(draw_elsewhere, case, options.device))
    print(as_text(case, checks))
    return 0 if all(check.passed for check in checks) else 1


def found(case: Case, device: str, elsewhere: Callable[[Path], None] | None = None) -> list[Check]:
    """What the checks found; whatever a trainer fails with is said with its name."""
    from dpbench.process.build import pick_device  # which imports torch

    on_gpu = pick_device(device).type == "cuda"
    card = gpu.visible_gpus()[0] if on_gpu and case.gpus == 1 else None  # ranks take their own
    try:
        with TemporaryDirectory() as folder:
            drawn = Path(folder) / "noise.pt" if elsewhere else None
            if elsewhere and drawn:
                elsewhere(drawn)
            # Work beside a measured process would be counted there.
            with gpu.exclusive(card, f"verify {case.id}") if card else nullcontext():
                checks: list[Check] = in_ranks(partial(_verify, device, drawn), case, device)[
                    CHECKS
                ]
        return checks
    except DpbenchError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
        raise DpbenchError(f"trainer {case.trainer} failed: {words}") from error


CHECKS = "checks"


def in_ranks(work: Callable[[Case], dict[str, Any]], case: Case, device: str) -> dict[str, Any]:
    """Work on a case in this process, or in all ranks of it; what the first returned."""
    if case.gpus == 1:
        return work(case)
    from dpbench.process.ranks import observe_all

    import_module("torch._dynamo")  # which the first optimizer imports: once for all ranks
    return observe_all(work, case, device)


def _verify(device: str, drawn: Path | None, case: Case) -> dict[str, Any]:
    from dpbench.verify.checks import verify

    return {CHECKS: verify(case, device, drawn)}


def _draw(device: str, file: Path, case: Case) -> dict[str, Any]:
    from dpbench.verify.checks import draw

    draw(case, device, file)
    return {}


def as_text(case: Case, checks: Sequence[Check]) -> str:
    """A table of the checks, and a line for each thing that is wrong."""
    lines = [[check.name, check.verdict, check.far, check.worst] for check in checks]
    headers = ["check", "verdict", "how far", "worst parameter"]
    table = Table(f"verify {case.id}", headers, lines).as_text(ONE_LINE)
    wrong = [f"{check.name}: {line}" for check in checks for line in check.wrong]
    return "\n".join([table, *([""] if wrong else []), *wrong])


def draw_elsewhere(case: Case, device: str, file: Path) -> None:
    """Let a process of its own write the noise of its steps."""
    command = [sys.executable, "-m", "dpbench", "verify", *arguments(case)]
    command += ["--micro-batches", str(case.micro_batches), "--device", device, "--draw", str(file)]
    path = {"PYTHONPATH": imported} if (imported := python_path(case)) else {}
    done = subprocess.run(
        command,
        env={**os.environ, **path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise DpbenchError(f"{shlex.join(command)} failed: {reason}")
