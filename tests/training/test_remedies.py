"""What a refusal says is true, and what it says would work trains as a loop over examples does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from opacus.layers import DPLSTM, DPRNN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench import TRAINERS, Workload
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.verify.reference import Examples

EXAMPLES = 4
OPACUS = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
GHOST = ("dpsgd_ghost",)


class Net(Workload, nn.Module):
    """A workload that is its own model: an embedding, layers of one's choice, and an output."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.way = way

    def model(self) -> nn.Module:
        return self

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.way(self, self.embedding(ids)))  # type: ignore[no-any-return]

    def batches(self, batch_size: int) -> list[Batch]:
        return [torch.arange(batch_size * 5).view(batch_size, 5) ** 2 % 9]

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return (3 * model(batch).flatten(1)).sin().sum(1)  # type: ignore[no-any-return]


class Crops(Net):
    """Each example has several crops, whose losses are averaged."""

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        crops = torch.stack([batch.roll(n, 1) for n in range(3)], 1)
        return super().losses(model, crops.flatten(0, 1)).view(-1, 3).mean(1)


class NextTokens(Net):
    """The last token is cut off, so that the batch is a view."""

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return super().losses(model, batch[:, :-1])


class NextTokensContiguous(Net):
    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return super().losses(model, batch[:, :-1].contiguous())


class Product(torch.autograd.Function):
    """A product with its own backward, as fused kernels have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2)


class OwnKernel(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias  # type: ignore[no-any-return,no-untyped-call]


def mid() -> nn.Module:
    return nn.Linear(6, 6)


def plain(net: Any, x: Tensor) -> Tensor:
    return net.mid(x)  # type: ignore[no-any-return]


def in_place(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.mid(x)
    y += x
    return y


def positions(net: Any, x: Tensor, *, repeated: bool = False) -> Tensor:
    rows = torch.arange(5).repeat(len(x) if repeated else 1, 1)
    return x + net.mid(rows)  # type: ignore[no-any-return]


def tied(net: Any, x: Tensor) -> Tensor:
    return net.second(net.mid(x).tanh())  # type: ignore[no-any-return]


def share(first: nn.Linear) -> dict[str, nn.Module]:
    second = nn.Linear(6, 6)
    second.weight = first.weight
    return {"mid": first, "second": second}


def recomputed(net: Any, x: Tensor, *, use_reentrant: bool) -> Tensor:
    block = nn.Sequential(net.mid, nn.Tanh())
    return checkpoint(block, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def detached(net: Any, x: Tensor) -> Tensor:
    return net.mid(x) + net.mid(x).detach()  # type: ignore[no-any-return]


def without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        constant: Tensor = net.mid(x)
    return net.mid(x) + constant  # type: ignore[no-any-return]


def as_image(net: Any, x: Tensor, *, contiguous: bool = False) -> Tensor:
    image = x[:, :, None].expand(-1, -1, 4, -1).permute(0, 3, 1, 2)
    image = image.contiguous() if contiguous else image
    return net.mid(image).mean(3).mT  # type: ignore[no-any-return]


def images(net: Any, x: Tensor) -> Tensor:
    return net.mid(x[:, :, None, None].expand(-1, -1, 2, 2, -1)).mean((2, 3))  # type: ignore[no-any-return]


def states(net: Any, x: Tensor) -> Tensor:
    return net.mid(x)[0]  # type: ignore[no-any-return]


class Row(NamedTuple):
    """What trainers refuse, what they say, and what they say would work.

    ``remedy`` is a mended workload for the same trainer, or the name of another trainer.
    """

    trainers: tuple[str, ...]
    bad: Callable[[], Net]
    said: str
    remedy: Callable[[], Net] | str


TIED = lambda: Net(tied, **share(nn.Linear(6, 6)))  # noqa: E731
UNTIED = lambda: Net(tied, mid=mid(), second=mid())  # noqa: E731
CONV = partial(nn.Conv2d, 6, 6, 3, padding=1)

ROWS = {
    "crops": Row(
        OPACUS,
        lambda: Crops(plain, mid=mid()),
        "use the trainer micro_batch",
        "micro_batch",
    ),
    "shared rows": Row(
        OPACUS,
        lambda: Net(positions, mid=nn.Embedding(5, 6)),
        "what examples share",
        lambda: Net(partial(positions, repeated=True), mid=nn.Embedding(5, 6)),
    ),
    "tied": Row(GHOST, TIED, "use the trainer micro_batch", "micro_batch"),
    "untied": Row(GHOST, TIED, "give each layer its own parameters", UNTIED),
    "checkpointed": Row(
        ("dpsgd", "dpsgd_fgc"),
        lambda: Net(partial(recomputed, use_reentrant=False), mid=mid()),
        "mid.weight (and 1 more): the backward does not reach every call of its layer; pass use_re",
        lambda: Net(partial(recomputed, use_reentrant=True), mid=mid()),
    ),
    "checkpointed, ghost": Row(
        GHOST,
        lambda: Net(partial(recomputed, use_reentrant=False), mid=mid()),
        "it is called several times; call it once, pass use_reentrant=True",
        lambda: Net(partial(recomputed, use_reentrant=True), mid=mid()),
    ),
    "detached": Row(
        OPACUS[:1],
        lambda: Net(detached, mid=mid()),
        "call the layer under torch.no_grad() if the loss does not depend on this call",
        lambda: Net(without_grad, mid=mid()),
    ),
    "called twice": Row(
        GHOST, lambda: Net(detached, mid=mid()), "or use the trainer micro_batch", "micro_batch"
    ),
    "channels last": Row(
        OPACUS,
        lambda: Net(as_image, mid=CONV()),
        "layer mid (Conv2d): its input is not contiguous; call .contiguous() on its input",
        lambda: Net(partial(as_image, contiguous=True), mid=CONV()),
    ),
    "tokens that are a view": Row(
        GHOST,
        lambda: NextTokens(plain, mid=mid()),
        "layer embedding (Embedding): view size is not comp",
        lambda: NextTokensContiguous(plain, mid=mid()),
    ),
    "by name": Row(
        OPACUS,
        lambda: Net(lambda net, x: net.mid(input=x), mid=mid()),
        "layer mid (Linear): list index out of range; pass its input by position",
        lambda: Net(plain, mid=mid()),
    ),
    "five dimensions": Row(
        GHOST,
        lambda: Net(images, mid=mid()),
        "call the layer itself, with two or three dimensions if it is linear",
        lambda: Net(plain, mid=mid()),
    ),
    "an operator without vmap": Row(
        OPACUS,
        lambda: Net(plain, mid=OwnKernel(6, 6)),
        "layer mid (OwnKernel)",
        "micro_batch",
    ),
    "in place": Row(
        OPACUS,
        lambda: Net(in_place, mid=mid()),
        "write y = y + x instead of y += x",
        lambda: Net(lambda net, x: net.mid(x) + x, mid=mid()),
    ),
    "LSTM": Row(
        OPACUS,
        lambda: Net(states, mid=nn.LSTM(6, 6, batch_first=True)),
        "use opacus.layers.DPLSTM instead",
        lambda: Net(states, mid=DPLSTM(6, 6, batch_first=True)),
    ),
    "RNN": Row(
        OPACUS,
        lambda: Net(states, mid=nn.RNN(6, 6, batch_first=True)),
        "use opacus.layers.DPRNN instead",
        lambda: Net(states, mid=DPRNN(6, 6, batch_first=True)),
    ),
}


def check_step(trainer: str, net: Net) -> None:
    """Take a step without noise, and compare it with a loop over the examples."""
    [batch] = net.double().batches(EXAMPLES)
    examples = Examples.computed(net, batch, net.losses)
    half = float(examples.norms.norm(dim=1).median())
    expected = examples.mean(examples.factors("flat", half))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    made = TRAINERS[trainer](
        net,
        batch_size=EXAMPLES,
        workload=net,
        noise_multiplier=0.0,
        max_grad_norm=half,
        learning_rate=1.0,
    )
    made.train_step(batch)
    for name, parameter in made.model.named_parameters():
        gradient = expected[name]
        assert (before[name] - parameter - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    ("row", "trainer"), [(name, t) for name, row in ROWS.items() for t in row.trainers]
)
def test_a_remedy_works(row: str, trainer: str) -> None:
    _, bad, said, remedy = ROWS[row]
    with pytest.raises(ConfigurationError) as refused:
        check_step(trainer, bad())
    message = str(refused.value)
    assert said in message
    assert "\n" not in message
    if isinstance(remedy, str):
        assert f"use the trainer {remedy}" in message
        check_step(remedy, bad())
    else:
        check_step(trainer, remedy())


def test_one_pass_clips_images_that_are_not_contiguous() -> None:
    check_step("fused", Net(as_image, mid=CONV()))
