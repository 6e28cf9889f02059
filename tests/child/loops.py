"""Training loops that know nothing of dpbench, and the phases of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def batches(size: int = 4, steps: int = 3) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(size * steps, 6)), batch_size=size)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(model: Any, batch: Tensor) -> Any:
    return cross_entropy(model(batch), batch.argmax(1) % 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> float:
    model, loss = network(), torch.zeros(())
    optimizer = sgd(model)
    for (batch,) in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def without_a_loader() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(model, torch.randn(4, 6)).backward()
        optimizer.step()


def accumulating() -> None:
    model = network()
    optimizer = sgd(model)
    for number, (batch,) in enumerate(batches(steps=6)):
        loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipping_the_whole_gradient() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def two_optimizers() -> None:
    model = network()
    ours = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for (batch,) in batches():
        loss_of(model, batch).backward()
        for optimizer in ours:
            optimizer.step()


def adversaries() -> None:
    first, second = network(), network()
    ours = [(first, sgd(first)), (second, sgd(second))]
    for (batch,) in batches():
        for model, optimizer in ours:
            loss_of(model, batch).backward()
            optimizer.step()


def critic_more_often() -> None:
    """Three updates of one to each of the other, without a batch between them."""
    first, second = network(), network()
    ours, theirs = sgd(first), sgd(second)
    for _ in range(3):
        for model, optimizer in [(first, ours)] * 3 + [(second, theirs)]:
            loss_of(model, torch.randn(4, 6)).backward()
            optimizer.step()


def several_in_a_row(ours: int, theirs: int, rounds: int = 6) -> Callable[[], None]:
    """So many updates of one and then of the other: local steps of clients, or of a GAN."""

    def loop() -> None:
        first, second = network(), network()
        one, other = (first, sgd(first)), (second, sgd(second))
        for _ in range(rounds):
            for model, optimizer in [one] * ours + [other] * theirs:
                loss_of(model, torch.randn(4, 6)).backward()
                optimizer.step()

    return loop


def both_and_one_again() -> None:
    """One update of two optimizers at once, and then two more of the second."""
    model = network()
    first, second = (sgd(layer) for layer in (model.get_submodule("0"), model.get_submodule("2")))
    for _ in range(6):
        for ours in ([first, second], [second], [second]):
            loss_of(model, torch.randn(4, 6)).backward()
            for optimizer in ours:
                optimizer.step()


def one_stage_after_the_other() -> None:
    """The optimizer of the first stage is kept, and steps no more."""
    first, second = network(), network()
    for model, optimizer in ((first, sgd(first)), (second, sgd(second))):
        for _ in range(30):
            loss_of(model, torch.randn(4, 6)).backward()
            optimizer.step()


def inner_optimizers() -> None:
    """Made anew for each task, as in meta-learning; the last step of each step is the outer one."""
    model = network()
    outer = sgd(model)
    for _ in range(3):
        for _ in range(2):
            adapted = network()
            inner = sgd(adapted)
            loss_of(adapted, torch.randn(4, 6)).backward()
            inner.step()
        loss_of(model, torch.randn(4, 6)).backward()
        outer.step()


def one_after_the_other() -> None:
    """Each with an optimizer that lives until the next one is there."""
    for _ in range(2):
        model = network()
        optimizer = sgd(model)
        for _ in range(3):
            loss_of(model, torch.randn(4, 6)).backward()
            optimizer.step()


def acting() -> None:
    """Calls without gradients come first in each step, and make what it is trained on."""
    actor = network()
    optimizer = sgd(actor)
    seen = torch.zeros(1, 6)
    for _ in range(3):
        for _ in range(20):
            with torch.no_grad():
                seen = torch.randn(1, 6) + actor(seen).mean()
        loss_of(actor, seen).backward()
        optimizer.step()


def of_all_data_with_a_closure() -> None:
    """Nothing is called outside the optimizer's step."""
    model, data = network(), torch.randn(4, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def with_a_closure() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for (batch,) in batches():

        def closure(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def scaling(overflows: int = 0, **how: Any) -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **how)
    for number, (batch,) in enumerate(batches()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch) * (torch.inf if number < overflows else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def updating_in_backward() -> None:
    model = network()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    for (batch,) in batches():
        loss_of(model, batch).backward()


def evaluating() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(model, batch)


def validating_in_inference_mode() -> None:
    """With batches, which elsewhere begin steps."""
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.inference_mode():
            for (other,) in batches(steps=2):
                loss_of(model, other)


def differentiating_by_func() -> None:
    """Per-example gradients without a backward; what clips them belongs to no phase."""
    model = network()
    optimizer = sgd(model)

    def loss(values: Any, example: Tensor) -> Any:
        return cross_entropy(
            functional_call(model, values, (example[None],)), torch.zeros(1).long()
        )

    for (batch,) in batches():
        values = {name: each.detach() for name, each in model.named_parameters()}
        gradients = vmap(grad(loss), (None, 0))(values, batch)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].sum(0)
        optimizer.step()


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, batch: Tensor) -> Any:
        return checkpoint(self.inner, batch, use_reentrant=True)


def checkpointing() -> None:
    model = Recomputing()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss_of(model, batch.requires_grad_()).backward()
        optimizer.step()


def penalising_gradients() -> None:
    model = network()
    optimizer = sgd(model)
    for (batch,) in batches():
        loss = loss_of(model, batch.requires_grad_())
        [slope] = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()


def private(max_grad_norm: Any = 1.0, **how: Any) -> Callable[[], None]:
    def loop() -> None:
        model = network()
        criterion: Any = nn.CrossEntropyLoss()
        found = PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=batches(),
            criterion=criterion,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
            **how,
        )
        wrapped, optimizer = found[0], found[1]
        if len(found) == 4:
            criterion = found[2]
        for (batch,) in found[-1]:
            optimizer.zero_grad()
            criterion(wrapped(batch), batch.argmax(1) % 3).backward()
            optimizer.step()

    return loop


class RecomputingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def updating_in_backward_of_what_is_computed_again() -> None:
    model = RecomputingLayers()
    for layer in model.layers:
        optimizer = sgd(layer)
        weight = next(layer.parameters())
        weight.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for (batch,) in batches():
        model(batch.requires_grad_()).square().mean().backward()


def in_physical_batches() -> None:
    model = network()
    wrapped, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=batches(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as memory:
        for (batch,) in memory:
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            optimizer.step()


LOOPS: list[tuple[Callable[[], object], list[str]]] = [
    (plain, ["OFBO"] * 3),
    (without_a_loader, ["FBO"] * 3),
    (accumulating, ["FBFBOO"] * 3),
    (clipping_the_whole_gradient, ["FBCO"] * 3),
    (two_optimizers, ["FBOOOO"] * 3),
    (adversaries, ["FBOFBO"] * 3),
    (critic_more_often, ["FBO" * 4] * 3),
    (inner_optimizers, ["FBO" * 3] * 3),
    (one_after_the_other, ["FBO"] * 6),
    (acting, ["FBO"] * 3),
    (with_a_closure, ["OFOBOFOBO"] * 3),
    (of_all_data_with_a_closure, ["OFOBOFOBO"] * 3),
    (scaling, ["FBOOO"] * 3),
    (updating_in_backward, ["FBOBOBOBOB"] * 3),
    (updating_in_backward_of_what_is_computed_again, ["FBOBOBOB"] * 3),
    (evaluating, ["FBO"] * 3),
    (validating_in_inference_mode, ["FBO"] * 3),
    (differentiating_by_func, ["FBO"] * 3),
    (checkpointing, ["FBO"] * 3),
    (penalising_gradients, ["FBFBO"] * 3),
    (private(), ["OFBOCONONO"] * 3),  # adds noise, and then scales
    (private(grad_sample_mode="ew"), ["OFBOCONONO"] * 3),
    (private(grad_sample_mode="functorch"), ["OFBOCONONO"] * 3),
    (private(grad_sample_mode="ghost"), ["OFBOBCBOCONONO"] * 3),  # zeroes gradients in between
    (private(clipping="per_layer", max_grad_norm=[1.0] * 4), ["OFBOCONONO"] * 3),
    (in_physical_batches, ["OFBOCOOFBOCONONO"] * 3),
]
"""Loops, and the phases of each of their steps without what is outside of all."""
