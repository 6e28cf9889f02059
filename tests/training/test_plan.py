"""Any model whose examples do not mix is trained, and what cannot be private is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench import TRAINERS
from dpbench.core.errors import ConfigurationError
from dpbench.training.plan import rows_by_example
from dpbench.training.units import UnitRule
from tests.training.test_fused_layers import EXAMPLES, PLAIN, TOKENS, FirstOf, Given
from tests.training.test_remedies import OwnKernel

_, TOKENS_EACH, WIDTH = TOKENS.shape


class Wrapped(nn.Module):
    """Calls a function with a linear layer, other modules and the input."""

    def __init__(self, call: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def tied_biases() -> nn.Module:
    model = tied()
    model[2].bias = model[0].bias
    return model


def positions(ids: Tensor) -> nn.Module:
    embedding = nn.Embedding(TOKENS_EACH, WIDTH)
    return Wrapped(lambda self, x: self.linear(x + self.positions(ids)), positions=embedding)


def tied_embedding() -> nn.Module:
    def call(self: Any, x: Tensor) -> Tensor:
        hidden = self.linear(self.embedding(x.argmax(-1)))
        logits: Tensor = self.head(hidden.tanh())
        return logits

    head, embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)
    head.weight = embedding.weight
    return Wrapped(call, head=head, embedding=embedding)


def class_token() -> nn.Module:
    def call(self: Any, x: Tensor) -> Tensor:
        joined = torch.cat([self.token.expand(len(x), -1, -1), x[:, 1:]], 1)
        scaled: Tensor = self.linear(joined) * self.scale
        return scaled

    token = nn.Parameter(torch.randn(1, 1, WIDTH))
    return Wrapped(call, token=token, scale=nn.Parameter(torch.randn(WIDTH)))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, **options)


def expert() -> nn.Module:
    """Tokens of all examples in one dimension, of which each expert takes some."""

    def call(self: Any, x: Tensor) -> Tensor:
        tokens = self.linear(x.flatten(0, 1))
        chosen = tokens.sum(-1) > 0
        made = torch.zeros_like(tokens)
        made[chosen] = tokens[chosen] @ self.experts.weight[0]
        made[~chosen] = tokens[~chosen] @ self.experts.weight[1]
        return made.view_as(x)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    return Wrapped(call, experts=Experts())


ANY: dict[str, Callable[[], nn.Module]] = {
    "tied linear layers": tied,
    "tied biases": tied_biases,
    "an embedding tied to a head": tied_embedding,
    "a weight used by a function": lambda: Wrapped(
        lambda self, x: F.linear(self.linear(x), self.other.weight), other=nn.Linear(WIDTH, WIDTH)
    ),
    "an embedding's weight used by a function": lambda: Wrapped(
        lambda self, x: F.linear(self.linear(self.table(x.argmax(-1))), self.table.weight),
        table=nn.Embedding(WIDTH, WIDTH),
    ),
    "positions with one row": lambda: positions(torch.arange(TOKENS_EACH)[None]),
    "positions without rows": lambda: positions(torch.arange(TOKENS_EACH)),
    "parameters beside layers": class_token,
    "examples and tokens in one dimension": lambda: Wrapped(
        lambda self, x: self.linear(x.flatten(0, 1)).view_as(x)
    ),
    "an argument by name": lambda: Wrapped(lambda self, x: self.linear(input=x)),
    "tokens first": lambda: Wrapped(lambda self, x: self.linear(x.transpose(0, 1)).transpose(0, 1)),
    "attention": lambda: encoder(batch_first=True),
    "attention with tokens first": lambda: Wrapped(
        lambda self, x: self.inner(self.linear(x).transpose(0, 1)).transpose(0, 1), inner=encoder()
    ),
    "recurrent": lambda: FirstOf(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "recurrent with tied parameters": lambda: FirstOf(DPLSTM(WIDTH, WIDTH, batch_first=True)),
    "experts": expert,
    "an operator without vmap": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), OwnKernel(WIDTH, WIDTH)
    ),
}


def update(
    model: Callable[[], nn.Module], trainer: str, batch: Tensor = TOKENS
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    workload = Given(model, batch)
    made = TRAINERS[trainer](
        workload.model(), batch_size=EXAMPLES, workload=workload,
        noise_multiplier=0.0, learning_rate=1.0, max_grad_norm=0.1,
    )  # fmt: skip
    before = [p.detach().clone() for p in made.model.parameters()]
    made.train_step(batch)
    pairs = zip(made.model.parameters(), before, strict=True)
    return made, torch.cat([(after.detach() - old).flatten() for after, old in pairs])


@pytest.mark.parametrize("trainer", ["fused", pytest.param(PLAIN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ANY)
def test_the_update_is_that_of_a_loop_over_examples(name: str, trainer: str) -> None:
    _, expected = update(ANY[name], "micro_batch")
    _, made = update(ANY[name], trainer)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)


def test_a_module_that_would_draw_other_random_numbers_is_refused() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.linear(x) * self.scale)
        return dropped

    def model() -> nn.Module:
        return Wrapped(call, drop=nn.Dropout(0.5), scale=nn.Parameter(torch.ones(WIDTH)))

    with pytest.raises(
        ConfigurationError,
        match=r"draws random numbers.*set its dropout to 0.*, or use the trainer micro_batch",
    ):
        update(model, "fused")


def test_only_what_needs_it_runs_again_by_example() -> None:
    once = r"to clip token and scale, fused runs .* forward and backward once more in each step$"
    with pytest.warns(UserWarning, match=once):
        trainer, _ = update(class_token, "fused")
    units = [rule for rule in trainer.rules.values() if isinstance(rule, UnitRule)]
    assert [[*rule.trained] for rule in units] == [["token", "scale"]]
    trainer, _ = update(lambda: positions(torch.arange(TOKENS_EACH)), "fused")
    assert not [rule for rule in trainer.rules.values() if isinstance(rule, UnitRule)]


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CenteredAtRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) - x.mean(0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += x.mean((0, 1))
        return x


@pytest.mark.parametrize("trainer", ["fused", PLAIN])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Centered, "the model or its loss mixes examples"),
        (CenteredAtRandom, "the model or its loss mixes examples"),
        (lambda: nn.BatchNorm1d(TOKENS_EACH, affine=False), "use GroupNorm instead"),
        (lambda: nn.BatchNorm1d(TOKENS_EACH).requires_grad_(False), "use GroupNorm instead"),
        (Counts, "buffer 1.mean changes with"),
    ],
)
def test_layers_that_mix_examples_are_refused(
    layer: Callable[[], nn.Module], said: str, trainer: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        update(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), layer()), trainer)


class SequenceFirst(nn.Module):
    """Layers whose first dimension is the token; ``restores`` if the outputs are by example."""

    def __init__(self, *, restores: bool) -> None:
        super().__init__()
        self.linear, self.encoder, self.restores = nn.Linear(WIDTH, WIDTH), encoder(), restores

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.encoder(self.linear(x.transpose(0, 1)))
        return made.transpose(0, 1) if self.restores else made


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: SequenceFirst(restores=True), ""),
        (lambda: SequenceFirst(restores=False), "must return one loss for each example"),
        (encoder, "mixes examples"),
    ],
)
def test_examples_in_another_dimension_are_clipped_or_refused_also_in_a_square_batch(
    model: Callable[[], nn.Module], said: str
) -> None:
    batch = torch.randn(EXAMPLES, EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    if said:
        with pytest.raises(ConfigurationError, match=said):
            update(model, "fused", batch)
    else:
        _, expected = update(model, "micro_batch", batch)
        _, made = update(model, "fused", batch)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)


def test_a_loss_that_divides_by_something_of_the_batch_is_refused() -> None:
    class Masked(Given):
        def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
            mask = batch[..., 0] > 0
            each = model(batch).square().sum(-1) * mask
            return each.sum(1) / mask.sum() * len(mask)

    workload = Masked(lambda: nn.Linear(WIDTH, WIDTH), TOKENS)
    trainer = TRAINERS["fused"](workload.model(), batch_size=EXAMPLES, workload=workload)
    with pytest.raises(
        ConfigurationError, match="divide an example's loss only by numbers of this"
    ):
        trainer.train_step(TOKENS)


def test_a_model_that_cannot_be_probed_is_trained_with_a_warning() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        if len(x) != EXAMPLES:
            raise RuntimeError(f"needs {EXAMPLES} examples")
        made: Tensor = self.linear(x)
        return made

    with pytest.warns(
        UserWarning, match="needs 5 examples.*whether it mixes examples is not known"
    ):
        update(lambda: Wrapped(call), "fused")


def test_random_numbers_of_a_function_do_not_count_as_mixed_examples() -> None:
    update(lambda: Wrapped(lambda self, x: F.dropout(self.linear(x), 0.5)), "fused")


def test_the_dimension_of_examples_is_the_one_that_grows_with_them() -> None:
    size = torch.Size
    assert rows_by_example([size((3, 5))], [size((2, 5))]) == (1,)
    assert rows_by_example([size((12, 5))], [size((8, 5))]) == (4,)
    assert rows_by_example([size((5, 3))], [size((5, 2))]) == (-1,)
    assert rows_by_example([size((5,)), size(())], [size((5,)), size(())]) == (0, 0)


def test_a_probe_leaves_buffers_and_random_numbers_as_they_were() -> None:
    def drawn(trainer: str) -> Tensor:
        update(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), trainer)
        return torch.rand(3)

    assert torch.equal(drawn("fused"), drawn("fused"))
