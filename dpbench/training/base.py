"""The interface of a trainer: one model, one optimizer, one `train_step`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
"""``(input_ids, labels)``, both int64 ``[B, T]``; labels are aligned with positions."""


class TrainerBase(ABC):
    """Trains ``model`` one batch at a time; the subclass says how.

    A subclass marks the parts of its step with `dpbench.phase`.

    Args:
        model: maps int64 token ids ``[B, T]`` to logits ``[B, T, V]``.
        batch_size: examples in every batch, B; a DP trainer scales its noise by it.
        learning_rate: step size of the optimizer.
        noise_multiplier: σ; the noise added to the summed gradient has deviation σ·C.
        max_grad_norm: C, the threshold to which each example's gradient is clipped.
        optimizer: called as ``optimizer(parameters, lr=…)``; SGD without momentum by default.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        learning_rate: float = 1e-3,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.model = model.train()
        self.plain_optimizer = optimizer(self.model.parameters(), lr=learning_rate)

    @abstractmethod
    def train_step(self, batch: Batch) -> Tensor:
        """One optimization step.

        Args:
            batch: ``(input_ids, labels)``, both int64 ``[B, T]`` with B = ``batch_size``.

        Returns:
            The mean cross-entropy over the batch before the update, detached, a scalar.
        """

    def unpack(self, batch: Batch) -> Batch:
        """The batch, if it has the size that this trainer was built for.

        Raises:
            ValueError: it has another. DP noise is scaled by the batch size, so a smaller
                last batch would silently get the wrong noise.
        """
        if len(batch[0]) != self.batch_size:
            raise ValueError(
                f"{type(self).__name__} was built for batches of {self.batch_size} "
                f"and got one of {len(batch[0])}"
            )
        return batch


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits ``[B, T, V]`` against labels ``[B, T]``, a scalar."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
