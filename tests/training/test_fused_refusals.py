"""What cannot be clipped from activations and output gradients is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from dpbench import TRAINERS
from dpbench.core.errors import ConfigurationError
from tests.training.test_fused_layers import BOTH, EXAMPLES, TOKENS, FirstOf, Given


class ChangedInPlace(nn.Module):
    """What a layer was given is another tensor afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        y = self.linear(x)
        x.mul_(2)
        return y + x


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ChangedInPlace, "layer linear (Linear)*was changed in place"),
        (lambda: FirstOf(nn.RNN(6, 6)), "the loss of an example is*mixes examples"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)), "layer 0 (BatchNorm1d)*use GroupNorm instead"),
        (
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta")),
            "all trained parameters must be on one device, not on cpu and meta*",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_clipped_is_refused_by_name(
    model: Callable[[], nn.Module], said: str
) -> None:
    workload, (begin, _, end) = Given(model, TOKENS), said.partition("*")

    def train(trainer: str) -> None:
        made = TRAINERS[trainer](workload.model(), batch_size=EXAMPLES, workload=workload)
        made.train_step(TOKENS)

    for trainer in BOTH:
        with pytest.raises(ConfigurationError) as caught:
            train(trainer)
        assert begin in str(caught.value)
        assert end in str(caught.value)


def test_an_embedding_that_changes_its_rows_when_it_reads_them_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=1.0))
    with pytest.raises(ConfigurationError, match="changes its weight in forward"):
        TRAINERS["fused"](model, batch_size=EXAMPLES)
