"""One example at a time: what many of them add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Batch, Workload


class Line(Workload):
    """One layer, whose outputs are the losses."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    def batches(self, batch_size: int) -> list[Batch]:
        return [torch.ones(batch_size, 4)]

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return model(batch).flatten()  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"micro_batches": 1000}], ids=str)
def test_at_bf16_the_thousandth_example_counts_as_much_as_the_first(
    options: dict[str, Any],
) -> None:
    line = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.zeros_(line.weight)
    private = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "learning_rate": 1.0}
    made = TRAINERS["micro_batch"](line, batch_size=1000, workload=Line(), **private, **options)
    made.train_step(torch.ones(1000, 4, dtype=torch.bfloat16))
    torch.testing.assert_close(line.weight, torch.full_like(line.weight, -0.5), rtol=0.01, atol=0)
