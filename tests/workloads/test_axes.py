"""Which parameters are trained, in models that were not made for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpbench.workloads.axes import LowRank, choose_trainable


class Own(nn.Linear):
    """A linear layer as projects have them, with another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_of_linear_gets_an_adapter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Own(4, 4))
    x = torch.ones(3, 4)
    before = model(x)
    choose_trainable(model, "lora:2")
    assert [type(layer) for layer in model] == [LowRank, nn.ReLU, LowRank]
    assert torch.equal(model(x), before), "an adapter adds nothing at first"
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained == [f"{layer}.{part}.weight" for layer in (0, 2) for part in ("down", "up")]


def test_a_layer_that_attention_does_not_call_is_named_and_works_as_before() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.ones(2, 3, 8)
    before = model(x)
    with pytest.warns(UserWarning, match="lora: out_proj of MultiheadAttention has no adapter"):
        choose_trainable(model, "lora:2")
    assert torch.allclose(model(x), before)
    assert isinstance(model.linear1, LowRank)
