"""Counts the minimum bytes that a private step reads to compute norms. No GPU is needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dpbench.core.case import Case


def of_rank(case: Case) -> Case:
    """Return a case of the standard trainer that trains the batch of one rank in one part."""
    case = replace(case.baseline, micro_batches=1)
    return replace(case, batch_size=case.batch_size // case.gpus, parallel="none", gpus=1)


def norm_reads(case: Case) -> int:
    """Return the minimum bytes that one rank reads to compute the norms of its examples' gradients.

    Clipping can begin only when all norms are known, so the clipping reads these bytes again. To
    compute norms for a module, a step reads the module's inputs and output gradients, or its
    per-sample gradients if they are smaller. Output gradients have the size of the outputs, which
    this function counts. Micro-batches are ignored.
    """
    import torch
    from torch.utils import _pytree as pytree

    from dpbench.child.build import build
    from dpbench.instruments.logical.case_count import untouched_torch
    from dpbench.instruments.logical.counter import without_data

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
