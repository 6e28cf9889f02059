"""Counts the minimum bytes that a private step reads for norms, without a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dpbench.core.case import Case


def of_rank(case: Case) -> Case:
    """Return a case of the standard trainer with the batch of one rank, without micro-batches."""
    case = replace(case.baseline, micro_batches=1)
    return replace(case, batch_size=case.batch_size // case.gpus, parallel="none", gpus=1)


def norm_reads(case: Case) -> int:
    """Return the minimum bytes that must be read for the norms of one rank's batch.

    Clipping needs all norms before it can weight a gradient, so one read cannot serve both norms
    and clipping. The norms of a module need the module's inputs and output gradients, or its
    per-sample gradients if these are smaller. Output gradients are as large as the outputs.
    Micro-batches are ignored.
    """
    import torch
    from torch.utils import _pytree as pytree

    from dpbench.child.build import build
    from dpbench.instruments.logical.counter import without_data
    from dpbench.instruments.logical.logical import untouched_torch

    case = replace(of_rank(case), activation_checkpointing="off")
    passing: Counter[torch.nn.Module] = Counter()

    def add(module: torch.nn.Module, given: object, out: object) -> None:
        leaves = pytree.tree_leaves((given, out))
        passing[module] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def gradients(module: torch.nn.Module) -> int:
        own = module.parameters(recurse=False)
        return case.batch_size * sum(each.nbytes for each in own if each.requires_grad)

    with untouched_torch(), without_data():
        trainer, (batch,) = build(case, torch.device("cpu"), 1)
        for module in filter(gradients, trainer.model.modules()):
            module.register_forward_hook(add)
        trainer.train_step(batch)
        return sum(min(size, gradients(module)) for module, size in passing.items())
