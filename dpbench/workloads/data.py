"""Random token batches: the bytes of a step do not depend on which tokens it sees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def get_random_dataloader(
    *,
    batch_size: int,
    seq_len: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    num_batches: int = 8,
    seed: int = 0,
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of uniformly random tokens that already lie on ``device``.

    Every batch has exactly ``batch_size`` examples (no Poisson sampling, whose batches vary
    in size), and the same seed gives the same tokens on every device.

    Returns:
        A loader of ``num_batches`` pairs ``(input_ids, labels)``, both int64 ``[B, T]``; each
        label is the token that follows its position.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(
        vocab_size, (num_batches * batch_size, seq_len + 1), generator=generator, device="cpu"
    ).to(device)
    dataset = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return DataLoader(dataset, batch_size=batch_size)
