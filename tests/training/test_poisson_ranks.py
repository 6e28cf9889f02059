"""Under DDP, ranks draw Poisson batches of their own, some of them empty."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Workload
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.instruments.logical.one_rank import fake_process_group
from dpbench.launch.ranks import on_all_ranks
from dpbench.training.base import Batch
from dpbench.training.parallel import rank_and_ranks

WIDTH = 512
SIZES = ((0, 3), (2, 0), (0, 0), (3, 2))
"""How many examples two ranks have in each step."""


class Squares(Workload):
    """A tied weight, and large and small parameters, whose order is not that of the layers."""

    def model(self) -> nn.Module:
        tied = nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(
            tied, nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        model[4].weight = tied.weight
        return model

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.randn(batch_size, WIDTH)

    def losses(self, model: Any, batch: Batch) -> Tensor:
        losses: Tensor = model(batch).square().mean(1)
        return losses


def trained(name: str, own: int | None, optimizer: Any = torch.optim.SGD) -> Tensor:
    """The parameters after all steps of rank ``own``, or of one process with all examples."""
    torch.manual_seed(0)
    workload = Squares()
    model = workload.model()
    trainer = TRAINERS[name](
        model,
        batch_size=2 if own is not None else 4,
        workload=workload,
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        learning_rate=0.1,
        optimizer=optimizer,
        sampling="poisson",
        parallel="none" if own is None else "ddp",
    )
    generator = torch.Generator().manual_seed(1)
    for sizes in SIZES:
        whole = torch.randn(sum(sizes), WIDTH, generator=generator)
        trainer.train_step(whole if own is None else whole.split(sizes)[own])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def on_this_rank(names: list[str], case: Case) -> list[bytes]:
    torch.set_num_threads(1)
    own, _ = rank_and_ranks()
    return [trained(name, own).numpy().tobytes() for name in names]


def test_ranks_with_empty_batches_train_as_one_process_with_all_examples() -> None:
    names = ["fused", "fused:graphs=false,kernels=false", "micro_batch"]
    case = resolve(Case("fused", 4, parallel="ddp", gpus=2, seq_len=8, model_size="50x16x1x2"))
    first, second = on_all_ranks(partial(on_this_rank, names), case, "cpu")
    for name, one, other in zip(names, first, second, strict=True):
        assert one == other
        made = torch.frombuffer(bytearray(one), dtype=torch.float32)
        assert torch.allclose(made, trained(name, None), atol=1e-6)


def test_under_fsdp2_poisson_batches_are_refused_by_name() -> None:
    with (
        fake_process_group(2),
        pytest.raises(ConfigurationError, match=r"FusedTrainer .*fsdp2: with sampling=poisson"),
    ):
        TRAINERS["fused"](nn.Linear(2, 2), batch_size=2, sampling="poisson", parallel="fsdp2")
