"""What cannot be clipped from activations and output gradients is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from dpbench import TRAINERS
from dpbench.core.errors import ConfigurationError
from tests.training.test_fused_layers import BOTH, EXAMPLES, TOKENS, FirstOf, Given


class Folded(nn.Module):
    """Examples and positions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class Named(Folded):
    """A layer that is called by name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(input=x)  # type: ignore[no-any-return]


class ChangedInPlace(Folded):
    """What a layer was given is another tensor afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        y = self.linear(x)
        x.mul_(2)
        return y + x


class TiedByHand(nn.Module):
    """An embedding whose weight is multiplied with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(-1)
        return nn.functional.linear(self.embedding(tokens), self.embedding.weight)


class NotCalled(Folded):
    """Beside a layer that is called, one whose weight is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x), self.other.weight)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Folded, r"layer linear (Linear) cannot be clipped*input has the shape [20, 6], but"),
        (TiedByHand, "uses parameter embedding.weight without a call of its layer*micro_batch"),
        (NotCalled, "uses parameter other.weight without a call of its layer*call the layer"),
        (Named, "layer linear (Linear)*must be called with one tensor, by position"),
        (ChangedInPlace, "layer linear (Linear)*was changed in place"),
        (lambda: nn.LSTM(6, 6), "Opacus cannot train the model, which is one layer (LSTM)"),
        (lambda: FirstOf(nn.RNN(6, 6)), "layer layer (RNN)*must return a tensor, not a tuple"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)), "layer 0 (BatchNorm1d)*use GroupNorm instead"),
        (
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).half()),
            "must be of one type on one device, not torch.float16 on cpu and torch.float32 on cpu",
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


@pytest.mark.parametrize(
    ("embedding", "why"),
    [
        (lambda: nn.Embedding(9, 6, max_norm=1.0), "an example's gradient depends on other"),
        (lambda: nn.EmbeddingBag(9, 6), "it takes more than one tensor"),
    ],
)
def test_embeddings_whose_gradients_are_of_no_single_example_are_refused(
    embedding: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        TRAINERS["fused"](nn.Sequential(embedding()), batch_size=EXAMPLES)
