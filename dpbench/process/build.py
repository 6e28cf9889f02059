"""From a case to its device, its trainer and its batches; and whether that trains at all."""

from __future__ import annotations

import math

import torch

from dpbench import gpu
from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.registry import MODELS, TRAINERS
from dpbench.training.base import Batch, TrainerBase
from dpbench.workloads.data import get_random_dataloader

SEED = 0
"""Every build of a case is the same: a profiler that needs several passes runs it again."""


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device."""
    if name == "auto":
        name = "cuda" if gpu.visible_gpus() else "cpu"
    if name == "cuda" and not (torch.backends.cuda.is_built() and gpu.visible_gpus()):
        raise ConfigurationError(
            f"no CUDA GPU: torch {torch.__version__}, {len(gpu.visible_gpus())} visible to the "
            f"driver; install a CUDA build of torch on a machine with one, or use --device cpu"
        )
    return torch.device(name)


def build(case: Case, device: torch.device, num_batches: int) -> tuple[TrainerBase, list[Batch]]:
    """The trainer of a case and its batches, everything on ``device`` and seeded."""
    torch.manual_seed(SEED)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    with device:
        model = MODELS[case.model](
            case.size, attention=case.attention, max_seq_len=max(1024, case.seq_len)
        )
    if case.precision == "bf16":
        model = model.to(torch.bfloat16)
    trainer = TRAINERS[case.trainer](model, batch_size=case.batch_size)
    loader = get_random_dataloader(
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        vocab_size=case.size.vocabulary,
        device=device,
        num_batches=num_batches,
        seed=SEED,
    )
    return trainer, [(input_ids, labels) for input_ids, labels in loader]


def smoke_test(case: Case, *, device: str = "cpu") -> None:
    """Train two steps of a case; raises what went wrong, an AssertionError if nothing moved."""
    trainer, batches = build(case, pick_device(device), num_batches=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    losses = [float(trainer.train_step(batch)) for batch in batches]
    if not all(map(math.isfinite, losses)):
        raise AssertionError(f"the loss is not finite: {losses}")
    if all(map(torch.equal, before, trainer.model.parameters())):
        raise AssertionError("no parameter changed in two steps")
