"""The minimum bytes that the norms of a private step read, counted without a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dpbench.core.case import Case


def of_rank(case: Case) -> Case:
    """The standard case of one rank's batch, without micro-batches."""
    case = replace(case.baseline, micro_batches=1)
    return replace(case, batch_size=case.batch_size // case.gpus, parallel="none", gpus=1)


def norm_reads(case: Case) -> int:
    """The minimum bytes that norms of all modules with trained parameters read.

    All norms must be known before any gradient is weighted, so one read cannot serve both. For each
    module norms read its inputs and output gradients, which are as large as the outputs, or its
    per-sample gradients if they are smaller. It is of one rank's batch without micro-batches.
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
