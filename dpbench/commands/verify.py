"""Check that a trainer clips and adds noise correctly, parameter by parameter.

Without noise, each step must subtract the mean of the examples' clipped gradients. The reference is
a loop over the examples. Half of the norms exceed the first clipping threshold, and all norms
exceed the second. The second threshold is also tried with micro-batches, and with another batch
size. If parameters also move otherwise, for example by weight decay, then the gradients that the
optimizer receives are judged.

Noise must have the deviation σC/B in each step and for several σ, C and B, whatever the gradients
are. Its distribution must be normal, including the tails. Noise must not repeat between elements,
parameters, steps, runs and processes, even if it is shifted. Correct noise fails with a probability
of at most 1e-6.

What steps leave behind in buffers and in the state of optimizers may depend on an example only as
far as noise hides it. A linear layer is trained for 240 steps, with noise and without. Two more
checks use this layer. An example must be clipped even if the terms of its ghost norm cancel. With
one rank, an example whose norm is NaN must not move finite parameters further than the threshold.
With several ranks, gradients are compared for the joint batch.

Each wrong parameter gets a line with the error. The exit code is 1 if a check fails or could not be
made, and 2 if the trainer refuses the case. Some faults are not found: faults that begin after 240
steps, data that the trainer keeps outside its model and optimizers, and noise that repeats in
another order or is predictable. A trainer that changes the noisy mean before its optimizer receives
it, such as by a bound on its norm, fails: verify it without this change.

Examples:
  dpbench verify --trainer dpsgd
  dpbench verify --trainer mypackage.trainers:MyTrainer --trainable lora:4
  dpbench verify --trainer dpsgd_ghost --parallel fsdp2 --gpus 2
  dpbench verify --trainer fused --workload resnet:depth=18,image_size=32 --batch-size 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from dpbench.child.recorder import Recorder
from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.core import gpu
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, DpbenchError, own_line
from dpbench.core.registry import locate
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement
from dpbench.show.layout import Table
from dpbench.verify.check_result import NOTE, Check
from dpbench.verify.recorder import CheckingRecorder

SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 16, "model_size": "tiny", "micro_batches": 2}
WIDTH = 300
"""Width of the table in characters. It keeps each check on one line despite long names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_case(parser, AXES, device="auto", **SMALL)


def run(options: argparse.Namespace) -> int:
    """Print the checks. Return 1 if a check failed or could not be made."""
    case = chosen_case(options, **SMALL)
    locate([case])
    checks = run_checks(case, options.device, processes=True)
    print(as_text(case, checks))
    if case.sampling == "fixed":
        print("not checked: Poisson samples, whose sizes differ (--sampling poisson)")
    return 0 if all(check.passed for check in checks) else 1


def run_checks(case: Case, device: str, *, processes: bool = False) -> list[Check]:
    """Run the checks. Convert unexpected errors to a `DpbenchError` that names the trainer."""
    # These import torch.
    from dpbench.child.build import pick_device
    from dpbench.training.refusals import CannotTrain
    from dpbench.verify.trainer_checks import verify

    on_gpu = pick_device(device).type == "cuda"
    # If the case has several ranks, `on_all_ranks` locks their GPUs.
    gpu_here = gpu.visible_gpus()[0] if on_gpu and case.gpus == 1 else None
    try:
        # Without the lock, a process that measures this GPU would count this work.
        with gpu.lock_gpu(gpu_here, f"verify {case.id}") if gpu_here else nullcontext():
            return verify(case, device, processes=processes)
    except CannotTrain as error:
        raise ConfigurationError(str(error)) from error
    except DpbenchError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
        raise DpbenchError(f"trainer {case.trainer} failed: {reason}") from error


def as_text(case: Subject, checks: Sequence[Check]) -> str:
    """Format the checks as a table. Below it are a line for each error, and the notes."""
    judged = [check for check in checks if check.verdict != NOTE]
    lines = [[check.name, check.verdict, check.error_text, check.worst] for check in judged]
    headers = ["check", "verdict", "found", "worst parameter"]
    title = f"verify {case.id}"
    table = Table(title, headers, lines, align="left").as_text(WIDTH)
    below = [f"{check.name}: {line}" for check in checks for line in check.wrong]
    below += [f"{check.name}: {check.error_text}" for check in checks if check.verdict == NOTE]
    return "\n".join([table, *([""] if below else []), *below])


@dataclass(frozen=True)
class ScriptChecks(Instrument):
    """Instrument of ``dpbench exec --verify``, which checks the steps of a script."""

    name: ClassVar[str] = "verify"

    def check_ranks(self, why: str) -> None:
        raise ConfigurationError(
            f"--verify checks only one process, but {why}: start a single process"
        )

    def start(self, case: Subject) -> PendingMeasurement:
        raise NotImplementedError  # this instrument checks only scripts

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return CheckingRecorder(steps)
