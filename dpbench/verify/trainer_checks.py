"""Runs all checks of a trainer, on the model of a case and on a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from dpbench.child.build import build, labels_of, pick_device
from dpbench.core.case import Case
from dpbench.core.case_names import names_of, resolve
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parted, read_parameters
from dpbench.launch.fork_server import postpone
from dpbench.launch.processes import new_process
from dpbench.launch.ranks import Work, on_all_ranks
from dpbench.training.correlated_noise import INDEPENDENT
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check_result import Check
from dpbench.verify.layer import check_layer
from dpbench.verify.reference import CLIPS, Gradients
from dpbench.verify.trained_model import TrainedModel
from dpbench.verify.verification import SIGMA, STEPS, THRESHOLD, Verification, noisy_steps

CHOSEN_BY_VERIFY = ("learning_rate", "noise_multiplier", "max_grad_norm")
"""Parameters of trainers that the checks set, so the trainer's name must not contain them."""

OTHER_PROCESS_SEED = 1000
"""Seed of the run in the other process. This process uses the seeds 1, 20 000, 3, 40 000, …"""


def verify(case: Case, device: str = "auto", *, processes: bool = False) -> list[Check]:
    """Check the trainer of a case. If the case has several ranks, start a process for each rank.

    Args:
        case: a small case. If its batch has several micro-batches, training the undivided batch is
            checked too.
        device: ``auto``, ``cpu`` or ``cuda``.
        processes: whether to compare the noise with the noise of a newly started process.

    Raises:
        ConfigurationError: the trainer refuses the case, or there is nothing to verify.
    """
    if case.gpus == 1:
        return verify_here(case, device, processes=processes)
    other_process = steps_of_other_process(case, device) if processes else []
    work = partial(_verify_rank, device, other_process)
    checks: list[Check] = _over_ranks(work, case, device)["checks"]
    return checks


def _over_ranks(work: Work, case: Case, device: str) -> dict[str, Any]:
    import_module("torch._dynamo")  # the first optimizer would import this in each fork
    return on_all_ranks(work, case, device)


def _verify_rank(device: str, other_process: Sequence[Gradients], case: Case) -> dict[str, Any]:
    return {"checks": verify_here(case, device, other_process)}


def verify_here(
    case: Case, device: str, other_process: Sequence[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """Check a case in this process. Every rank must call this, because ranks step together.

    Gradients are compared with the gradients of the joint batch of all ranks. Only rank 0 judges
    the noise.

    Args:
        case: see `verify`.
        device: see `verify`.
        other_process: noisy steps of another process, from `steps_of_other_process`.
        processes: whether to start that other process now.
    """
    place = pick_device(device)
    if refused := [
        name for name in read_parameters(parted(case.trainer)[1]) if name in CHOSEN_BY_VERIFY
    ]:
        raise ConfigurationError(f"verify chooses {refused[0]}: leave it out of the trainer's name")
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        trainer, _ = build(case, place, 1)
        if isinstance(trainer, StandardTrainer):
            raise ConfigurationError(
                f"trainer {case.trainer} clips nothing and adds no noise, so verify has nothing "
                f"to check"
            )
        clips = labels_of(trainer).get("clips", "flat")
        if clips not in CLIPS:
            raise unknown(f"label clips of trainer {case.trainer}", clips, CLIPS)
        weights = getattr(trainer, "noise_weights", INDEPENDENT)
        del trainer
        verification = Verification(case, place, clips, weights)
        checks = verification.checks(
            steps_of_other_process(case, device) if processes else other_process
        )
        return [*checks, *check_layer(case, place, clips, weights)]


def steps_of_other_process(case: Case, device: str) -> list[Gradients]:
    """Take a case's noisy steps in a new process. Return the updates as float64 on the CPU."""
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    with new_process() as pool:
        steps = pool.submit(_take_noisy_steps, replace(case, **spelled), device).result()
    return [{name: torch.from_numpy(g).double() for name, g in step.items()} for step in steps]


def _take_noisy_steps(case: Case, device: str) -> list[dict[str, Any]]:
    postpone("opacus")
    case = resolve(case)
    work = partial(_noise_of_rank, device)
    record = work(case) if case.gpus == 1 else _over_ranks(work, case, device)
    steps: list[dict[str, Any]] = record["noise"]
    return steps


def _noise_of_rank(device: str, case: Case) -> dict[str, Any]:
    model, whole = TrainedModel(case, pick_device(device), STEPS), replace(case, micro_batches=1)
    list(model.steps(whole, model.first_steps, model.batches, 0.0))  # as in the verifying process
    steps = noisy_steps(model, whole, model.batches, STEPS, SIGMA, THRESHOLD, OTHER_PROCESS_SEED)
    arrays = [{name: g.float().cpu().numpy() for name, g in step.items()} for step in steps]
    return {"noise": arrays}
