"""A trainer seen from outside: what its steps add to parameters, and what they should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from dpbench.child.build import build
from dpbench.core.case import BASELINE_TRAINER, MIXED, Case
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.parallel import gathered, part_of_rank, rank_and_ranks
from dpbench.verify.reference import Examples, Gradients
from dpbench.workloads.base import examples_in

RATE = 2.0**30
"""The learning rate. With plain SGD, what is taken off a parameter is so much larger than it that
rounding the sum to the parameter's type rounds the gradient, and no more."""

ALONE: Mapping[str, Any] = MappingProxyType({"parallel": "none", "gpus": 1})
"""The axes of a case that one process trains."""

STARTS = 0.02
"""Deviation of trained parameters that begin as zeros. One adapter of a pair has no gradient while
the other is zero, so nothing would be known of its clipping."""


class Subject:
    """What a case trains: where its parameters begin, its batches and its examples' gradients."""

    def __init__(self, case: Case, device: torch.device, steps: int) -> None:
        precision = "fp32" if case.precision in (*MIXED, "tf32") else case.precision
        plain = replace(
            case,
            trainer=BASELINE_TRAINER,
            precision=precision,
            optimizer="sgd",
            micro_batches=1,
            activation_checkpointing="off",
            **ALONE,
        )
        self.case, self.device = case, device
        trainer, self.batches = build(plain, device, steps, alone=True)
        self.model, self._losses = without_dropout(trainer.model), trainer.example_losses
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            if parameter.requires_grad and not parameter.any():
                noise = torch.randn(parameter.shape, generator=generator) * STARTS
                parameter.data.copy_(noise)
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.dtype = self.start[self.trained[0]].dtype
        self.reference = "float64"
        """In what the examples' gradients were computed."""
        self.changed: set[str] = set()
        """The frozen parameters that some step has changed."""
        self.apart: set[str] = set()
        """The parameters that some step has left different in some of the ranks."""
        self.buffers: dict[str, Tensor] = {}
        """The model's buffers after the latest step."""

    def examples(self) -> list[Examples]:
        """The gradients of each batch's examples, in float64 if the model can be computed so."""
        try:
            return self._examples(torch.float64)
        except RuntimeError as error:
            words = str(error).partition("\n")[0]
            self.reference = f"float32, because float64 fails: {words}"
            return self._examples(torch.float32)

    def _examples(self, dtype: torch.dtype) -> list[Examples]:
        def place(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        self.model.to(dtype)
        batches = [pytree.tree_map(place, batch) for batch in self.batches]
        # With gradients, which a loss may be made of.
        once, again = (self._losses(self.model, batches[0]).detach() for _ in range(2))
        if not torch.equal(once, again):
            raise ConfigurationError(
                "a batch has other losses each time that they are computed, so no gradient can be "
                "verified: take what is random out of model and losses"
            )
        return [Examples.of(self.model, batch, self._losses) for batch in batches]

    def steps(
        self,
        case: Case,
        number: int,
        batches: Sequence[Batch],
        sigma: float = 1.0,
        threshold: float = 1.0,
        seed: int = 0,
    ) -> Iterator[Gradients]:
        """What each step of a case's trainer takes off, divided by the learning rate.

        Each begins where the first did, with the next of the batches; a rank has its part of it.
        """
        alone = case.gpus == 1
        plain = case.optimizer == "sgd"
        options: dict[str, Any] = {
            "noise_multiplier": sigma,
            "max_grad_norm": threshold,
            "learning_rate": RATE,
        }
        trainer, _ = build(case, self.device, 1, seed=seed, alone=alone, **options)
        if not alone and seed % 2:  # scripts seed ranks apart, or all alike: noise must bear both
            torch.manual_seed(seed)
        model = without_dropout(trainer.model)
        parameters = {_own_name(name): p for name, p in model.named_parameters()}
        buffers = {_own_name(name): b for name, b in model.named_buffers()}
        if parameters.keys() != self.start.keys():
            other = sorted(parameters.keys() ^ self.start.keys())[0]
            raise ConfigurationError(
                f"{type(trainer).__name__} trains another model than the workload's: only one of "
                f"them has a parameter {other}"
            )
        trained = {name: parameters[name] for name in self.trained}
        update = _by_parameters if plain else _by_optimizer
        starts = {name: shared_out(self.start[name], p) for name, p in parameters.items()}
        before = {name: self.start[name].double() for name in trained}
        with torch.no_grad():
            for name in buffers.keys() & self._buffers.keys():  # some are drawn with the model
                buffers[name].copy_(self._buffers[name])
        for batch in islice(cycle(batches), number):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(starts[name])
            seen = update(trainer, batch if alone else own_part_of(batch), trained, before)
            self.apart |= set() if alone else differing(seen)
            self.changed |= {
                name
                for name, parameter in parameters.items()
                if name not in trained and not torch.equal(gathered(parameter), self.start[name])
            }
            self.buffers = {name: b.detach().clone() for name, b in buffers.items()}
            yield seen


def _own_name(name: str) -> str:
    """A parameter's or buffer's name in the workload's model, whatever wraps that."""
    return name.removeprefix("_module.").removeprefix("module.")


Parameters = Mapping[str, nn.Parameter]


def _by_parameters(trainer: Any, batch: Batch, trained: Parameters, before: Gradients) -> Gradients:
    """How far a step with plain SGD moves parameters from what they were before."""
    trainer.train_step(batch)
    return {name: (before[name] - value) / RATE for name, value in values_of(trained).items()}


def _by_optimizer(trainer: Any, batch: Batch, trained: Parameters, before: Gradients) -> Gradients:
    """The gradients that the plain optimizer is handed in a step; zeros where nothing moves."""
    handed = {name: torch.zeros_like(value) for name, value in before.items()}
    seen = False

    def take(_: object, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        nonlocal seen
        # A closure computes gradients later.
        seen = len(given) == 1 and named.get("closure") is None
        for name, p in trained.items():
            if p.grad is not None:
                handed[name] += gathered(p.grad).double()

    hook = trainer.plain_optimizer.register_step_pre_hook(take)
    try:
        trainer.train_step(batch)
    finally:
        hook.remove()
    moved = {name for name, v in values_of(trained).items() if not torch.equal(before[name], v)}
    if moved and not seen:
        raise ConfigurationError(
            f"{type(trainer).__name__} does not call plain_optimizer.step(), without closure, "
            f"where verify sees the gradients of other optimizers than sgd: say --optimizer sgd"
        )
    return {name: g * (name in moved) for name, g in handed.items()}


def values_of(parameters: Parameters) -> dict[str, Tensor]:
    """Whole parameters, in float64."""
    return {name: gathered(p.detach()).double() for name, p in parameters.items()}


def shared_out(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """The value of a parameter, for this rank to copy into its shard if it has one."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def own_part_of(batch: Batch) -> Batch:
    """What this rank trains of a batch."""
    own = part_of_rank(examples_in(batch), *rank_and_ranks())
    return pytree.tree_map(lambda tensor: tensor[own], batch)


def differing(values: Gradients) -> set[str]:
    """The names of tensors that are not the same in all ranks, to the last bit."""
    flat = torch.cat([value.flatten() for value in values.values()])
    least, most = flat.clone(), flat
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    same = (least == most).split([value.numel() for value in values.values()])
    return {name for name, equal in zip(values, same, strict=True) if not equal.all()}


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with dropout that drops nothing, so that a loss is the same each time."""
    for layer in model.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    return model
