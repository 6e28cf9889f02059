"""Memory of a backward pass if a tensor was used several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from dpbench.instruments.logical import counter as counting
from dpbench.instruments.logical.counter import without_data
from dpbench.instruments.logical.memory import in_place_variant
from dpbench.training.phases import observed_step
from tests.instruments.logical.cases import totals

N = 200
P = 4 * N * N
"""Bytes of a weight."""

Loss = Callable[[Tensor, Tensor], Tensor]

USES: dict[str, Loss] = {
    "tied weights": lambda h, w: (h @ w @ w).square().sum(),
    "three times tied": lambda h, w: (h @ w @ w @ w).square().sum(),
    "a residual": lambda h, w: (h + h @ w).square().sum(),
    "a residual whose gradient is expanded": lambda h, w: (h + h @ w).sum(),
    "three branches": lambda h, w: h.relu().sum() + h.sigmoid().sum() + h.tanh().sum(),
    "the same twice": lambda h, w: (h + h).square().sum(),
    "two residuals": lambda h, w: ((h + h.tanh()) + (h @ w).relu()).square().sum(),
    "shared by two sums": lambda h, w: ((h + w[:4]).square() + h.exp() * w[:4].exp()).sum(),
    "views": lambda h, w: h.view(-1).exp().sum() + h.t().tanh().sum() + h.relu().sum(),
    "twice in a row": lambda h, w: torch.cat([h, h]).square().sum(),
    "parts and whole": lambda h, w: sum((a.exp().sum() for a in h.split(2)), h.sum()),
}


def backward(loss: Loss) -> Callable[[], Any]:
    """Run backward for a loss of a hidden layer and a weight."""
    w = torch.randn(N, N, requires_grad=True)
    x = torch.randn(4, N, requires_grad=True)
    found = loss(x * 2, w)
    return lambda: torch.autograd.grad(found, [x, w], allow_unused=True)


@pytest.mark.parametrize("loss", USES.values(), ids=USES)
def test_gradients_are_added_in_place_where_autograd_does_it(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = backward(loss)
    with profile() as profiled:
        run()
    names = {"aten::add": "aten.add.Tensor", "aten::add_": "aten.add_.Tensor"}
    without_mode = [names[event.name] for event in profiled.events() if event.name in names]

    seen: list[str] = []

    def noting(func: Any, args: tuple[Any, ...]) -> Any:
        runs = in_place_variant(func, args)
        if str(func) in names.values():
            seen.append(str(runs))
        return runs

    with without_data():
        run = backward(loss)
        monkeypatch.setattr(counting, "in_place_variant", noting)
        run()
    assert seen == without_mode


def test_a_weight_that_is_used_twice_has_two_gradients_at_once() -> None:
    """There is no third gradient for their sum."""
    with without_data() as counter:
        weight = nn.Parameter(torch.randn(N, N))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with observed_step(counter):
                x = torch.randn(4, N)
                (x @ weight @ weight).square().mean().backward()
                optimizer.step()
    [peak] = counter.peaks.values()
    assert 3 * P <= peak < 3.2 * P
    added = totals(counter)["outside", "aten.add"]
    assert (added["read_bytes"], added["write_bytes"]) == (2 * P, P)


def test_gradients_of_parts_of_a_batch_add_up_in_one_tensor() -> None:
    with without_data() as counter:
        layer = nn.Linear(N, N, bias=False)
        with observed_step(counter):
            for _ in range(3):
                layer(torch.randn(4, N)).square().mean().backward()
    assert 3 * P <= counter.peaks["outside"] < 3.2 * P
