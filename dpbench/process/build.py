"""From a case to its trainer and its batches."""

from __future__ import annotations

import torch

from dpbench.case import Case
from dpbench.registry import MODELS, TRAINERS
from dpbench.training.base import Batch, TrainerBase
from dpbench.workloads.data import get_random_dataloader

SEED = 0
"""Every build of a case is the same: a profiler that needs several passes runs it again."""


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
