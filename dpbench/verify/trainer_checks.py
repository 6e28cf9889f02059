"""Runs every check of a trainer: of its clipped gradients without noise, and of its noise."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch

from dpbench.child.build import build, labels_of, pick_device
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parted, read_parameters
from dpbench.core.registry import names_of, resolve
from dpbench.launch.fork_server import postpone
from dpbench.launch.ranks import Work, on_all_ranks
from dpbench.training.correlated_noise import INDEPENDENT
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check_result import Check
from dpbench.verify.layer import check_layer
from dpbench.verify.reference import CLIPS, Gradients
from dpbench.verify.trained_model import TrainedModel
from dpbench.verify.verification import SIGMA, STEPS, THRESHOLD, Verification, noisy_steps

CHOSEN_HERE = ("learning_rate", "noise_multiplier", "max_grad_norm")
"""Parameters of every trainer whose values the checks choose."""

SEED_ELSEWHERE = 1000
"""Seed of the run in another process. Runs in this process have seeds 1, 20 000, 3, 40 000, …"""


def verify(case: Case, device: str = "auto", *, processes: bool = False) -> list[Check]:
    """Check the trainer of a case. For several GPUs this starts one process per rank.

    Args:
        case: a small case. With several micro-batches, the undivided batch is checked as well.
        device: ``auto``, ``cpu`` or ``cuda``.
        processes: whether to compare the noise with that of a newly started process.

    Raises:
        ConfigurationError: the trainer refuses the case, or there is nothing to verify.
    """
    if case.gpus == 1:
        return verify_here(case, device, processes=processes)
    elsewhere = noise_elsewhere(case, device) if processes else []
    work = partial(_verify_rank, device, elsewhere)
    checks: list[Check] = _over_ranks(work, case, device)["checks"]
    return checks


def _over_ranks(work: Work, case: Case, device: str) -> dict[str, Any]:
    import_module("torch._dynamo")  # the first optimizer imports it: do so once, before the forks
    return on_all_ranks(work, case, device)


def _verify_rank(device: str, elsewhere: Sequence[Gradients], case: Case) -> dict[str, Any]:
    return {"checks": verify_here(case, device, elsewhere)}


def verify_here(
    case: Case, device: str, elsewhere: Sequence[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """Check a case in this process. Every rank must call it, because steps are collective.

    Gradients are compared with those of the joint batch. Rank 0 alone judges the noise.

    Args:
        case: see `verify`.
        device: see `verify`.
        elsewhere: noisy steps that another process took, from `noise_elsewhere`.
        processes: whether to start such a process now.
    """
    place = pick_device(device)
    if given := [name for name in read_parameters(parted(case.trainer)[1]) if name in CHOSEN_HERE]:
        raise ConfigurationError(f"{given[0]} is chosen by verify: leave it out of the trainer")
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        trainer, _ = build(case, place, 1)
        if isinstance(trainer, StandardTrainer):
            raise ConfigurationError(
                f"trainer {case.trainer} clips nothing and adds no noise: there is nothing to "
                f"verify"
            )
        clips = labels_of(trainer).get("clips", "flat")
        if clips not in CLIPS:
            raise unknown(f"label clips of trainer {case.trainer}", clips, CLIPS)
        weights = getattr(trainer, "noise_weights", INDEPENDENT)
        del trainer
        verification = Verification(case, place, clips, weights)
        checks = verification.checks(noise_elsewhere(case, device) if processes else elsewhere)
        return [*checks, *check_layer(case, place, clips, weights)]


def noise_elsewhere(case: Case, device: str) -> list[Gradients]:
    """Take a case's noisy steps in a new process; return the updates as float64 on the CPU."""
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    ends_at_once = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no traceback of this process
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ends_at_once) as pool:
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
    subject, whole = TrainedModel(case, pick_device(device), STEPS), replace(case, micro_batches=1)
    steps = noisy_steps(subject, whole, subject.batches, STEPS, SIGMA, THRESHOLD, SEED_ELSEWHERE)
    arrays = [{name: g.float().cpu().numpy() for name, g in step.items()} for step in steps]
    return {"noise": arrays}
