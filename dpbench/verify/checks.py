"""Every check of a trainer: what is taken off parameters at σ = 0, and the noise."""

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
from dpbench.launch.ranks import Observe, observe_all
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check import Check
from dpbench.verify.layer import check_layer
from dpbench.verify.reference import CLIPS, Gradients
from dpbench.verify.subject import Subject
from dpbench.verify.verification import SIGMA, STEPS, THRESHOLD, Verification, noise_of

OWN = ("learning_rate", "noise_multiplier", "max_grad_norm")
"""The parameters of a trainer that are chosen here."""

ELSEWHERE = 1000
"""The seed of another process; those of runs in this one are 1, 2 and so on."""


def verify(case: Case, device: str = "auto", *, processes: bool = False) -> list[Check]:
    """Hold the trainer of a case to what it says; over ranks, in processes that it starts.

    Args:
        case: small; with several micro-batches, the batch as a whole is tried as well.
        device: ``auto``, ``cpu`` or ``cuda``.
        processes: whether noise is compared with that of another process.

    Raises:
        ConfigurationError: the trainer refuses the case, or there is nothing to verify.
    """
    if case.gpus == 1:
        return verify_here(case, device, processes=processes)
    drawn = draw_elsewhere(case, device) if processes else []
    checks: list[Check] = _over_ranks(partial(_verify_rank, device, drawn), case, device)["checks"]
    return checks


def _over_ranks(work: Observe, case: Case, device: str) -> dict[str, Any]:
    import_module("torch._dynamo")  # which the first optimizer imports: once for all ranks
    return observe_all(work, case, device)


def _verify_rank(device: str, drawn: Sequence[Gradients], case: Case) -> dict[str, Any]:
    return {"checks": verify_here(case, device, drawn)}


def verify_here(
    case: Case, device: str, drawn: Sequence[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """`verify` in this process, which all ranks of a case do together.

    Gradients are held to those of the joint batch, and noise is compared with what was ``drawn``.
    """
    place = pick_device(device)
    if given := [name for name in read_parameters(parted(case.trainer)[1]) if name in OWN]:
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
        del trainer
        verification = Verification(case, place, clips)
        checks = verification.checks(draw_elsewhere(case, device) if processes else drawn)
        return [*checks, *check_layer(case, place, clips)]


def draw_elsewhere(case: Case, device: str) -> list[Gradients]:
    """The noise of a case's steps in a process of its own, on the CPU."""
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    at_once = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback of its own
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, at_once) as pool:
        drawn = pool.submit(_draw, replace(case, **spelled), device).result()
    return [{name: torch.from_numpy(g).double() for name, g in step.items()} for step in drawn]


def _draw(case: Case, device: str) -> list[dict[str, Any]]:
    postpone("opacus")
    case = resolve(case)
    work = partial(_noise, device)
    drawn = work(case) if case.gpus == 1 else _over_ranks(work, case, device)
    noise: list[dict[str, Any]] = drawn["noise"]
    return noise


def _noise(device: str, case: Case) -> dict[str, Any]:
    subject, whole = Subject(case, pick_device(device), STEPS), replace(case, micro_batches=1)
    noise = noise_of(subject, whole, subject.batches, STEPS, SIGMA, THRESHOLD, ELSEWHERE)
    arrays = [{name: g.float().cpu().numpy() for name, g in step.items()} for step in noise]
    return {"noise": arrays}
