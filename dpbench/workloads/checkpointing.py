"""Activation checkpointing: what a block computed is not kept, but computed again in backward.

In PyTorch's reentrant way, for every trainer: a block runs without autograd first, when Opacus's
hooks do not listen, and once with it in backward. In the other way (``use_reentrant=False``) the
hooks hear each layer twice in forward and once in backward, and Opacus fails.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.workloads.base import Workload


def checkpoint_blocks(workload: Workload, model: nn.Module) -> None:
    """Let each of the workload's blocks run again in backward."""
    for block in list(workload.blocks(model)):
        block.forward = partial(_again_in_backward, block.forward)


def _again_in_backward(forward: Any, first: Tensor, *others: Any, **options: Any) -> Any:
    """A block whose first argument, the activations ``[B, …]``, came from the block before."""
    if not first.requires_grad:  # what is before is frozen: else nothing here would be trained
        first = first.detach().requires_grad_()
    return checkpoint(partial(forward, **options), first, *others, use_reentrant=True)
