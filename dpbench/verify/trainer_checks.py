"""Runs all checks of a trainer, on the model of a case and on a linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from dpbench.launch.ranks import on_all_ranks
from dpbench.training.correlated_noise import INDEPENDENT
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check_result import Check
from dpbench.verify.layer import check_layer
from dpbench.verify.reference import CLIPS, Gradients
from dpbench.verify.verification import Verification

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
    import_module("torch._dynamo")  # the first optimizer would import this in each fork
    with _other_process(case, device, processes) as steps:
        work = partial(_verify_rank, device, [*steps])
    return on_all_ranks(work, case, device)[0]


def _verify_rank(device: str, other_process: Iterable[Gradients], case: Case) -> list[Check]:
    return verify_here(case, device, other_process)


def verify_here(
    case: Case, device: str, other_process: Iterable[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """Check a case in this process. Every rank must call this, because ranks step together.

    Gradients are compared with the gradients of the joint batch of all ranks. Only rank 0 judges
    the noise.

    Args:
        case: see `verify`.
        device: see `verify`.
        other_process: noisy steps of another process.
        processes: whether to start that other process now.
    """
    place = pick_device(device)
    if refused := [
        name for name in read_parameters(parted(case.trainer)[1]) if name in CHOSEN_BY_VERIFY
    ]:
        raise ConfigurationError(f"verify chooses {refused[0]}: leave it out of the trainer's name")
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        verification = _verification(case, place)
        with _other_process(case, device, processes) as steps:
            steps = steps if processes else other_process
            if place.type == "cuda":  # its memory may not suffice for both processes
                steps = [*steps]
            checks = [*verification.checks(steps)]
            return [*checks, *check_layer(case, place, verification.clips, verification.weights)]


def _verification(case: Case, device: torch.device) -> Verification:
    trainer, _ = build(case, device, 1)
    if isinstance(trainer, StandardTrainer):
        raise ConfigurationError(
            f"trainer {case.trainer} clips nothing and adds no noise, so verify has nothing to "
            f"check"
        )
    clips = labels_of(trainer).get("clips", "flat")
    if clips not in CLIPS:
        raise unknown(f"label clips of trainer {case.trainer}", clips, CLIPS)
    weights = getattr(trainer, "noise_weights", INDEPENDENT)
    del trainer
    return Verification(case, device, clips, weights)


@contextmanager
def _other_process(case: Case, device: str, starts: bool) -> Iterator[Iterable[Gradients]]:
    """Start a process that takes a case's noisy steps, if it ``starts``.

    Yield the updates, as float64 on the CPU. Iterating over them waits for the process.
    """
    if not starts:
        yield []
        return
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    with new_process() as pool:
        pool.submit(postpone, "opacus")  # before the modules of trainers are imported
        taken = pool.submit(_take_noisy_steps, replace(case, **spelled), device)

        def steps() -> Iterator[Gradients]:
            for step in taken.result():
                yield {name: torch.from_numpy(g).double() for name, g in step.items()}

        yield steps()


def _take_noisy_steps(case: Case, device: str) -> list[dict[str, Any]]:
    case = resolve(case)
    work = partial(_noise_of_rank, device)
    import_module("torch._dynamo")  # the first optimizer would import this in each fork
    return work(case) if case.gpus == 1 else on_all_ranks(work, case, device)[0]


def _noise_of_rank(device: str, case: Case) -> list[dict[str, Any]]:
    steps = _verification(case, pick_device(device)).steps_elsewhere(OTHER_PROCESS_SEED)
    return [{name: g.float().cpu().numpy() for name, g in step.items()} for step in steps]
