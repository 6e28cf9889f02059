"""Runs a trainer's steps, and computes the gradients with which each step updates parameters."""

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
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from dpbench.child.build import build
from dpbench.core.case import BASELINE_TRAINER, MIXED, Case
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.parallel import gathered, part_of_rank, rank_and_ranks
from dpbench.verify.reference import Examples, Gradients
from dpbench.workloads.base import examples_in

RATE = 2.0**30
"""Learning rate of the checked steps. With SGD, the update is computed as (value before the step -
value after the step) / `RATE`. The rate is so large that rounding the new value hardly changes this
result."""

ONE_PROCESS: Mapping[str, Any] = MappingProxyType({"parallel": "none", "gpus": 1})
"""Values of the axes ``parallel`` and ``gpus`` of a case that trains in one process."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of the random values that replace a trained parameter full of zeros. If one
LoRA matrix of a pair were zero, the other matrix would have no gradient whose clipping can be
checked."""


class TrainedModel:
    """A case's model, initial parameters, batches and reference gradients."""

    def __init__(self, case: Case, device: torch.device, steps: int) -> None:
        precision = "fp32" if case.precision in (*MIXED, "tf32") else case.precision
        plain = replace(
            case,
            trainer=BASELINE_TRAINER,
            precision=precision,
            optimizer="sgd",
            micro_batches=1,
            activation_checkpointing="off",
            sampling="fixed",
            compile="off",
            **ONE_PROCESS,
        )
        self.case, self.device = case, device
        trainer, self.batches = build(plain, device, steps, alone=True)
        self.model, self._losses = without_dropout(trainer.model), trainer.example_losses
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            if parameter.requires_grad and not parameter.any():
                noise = torch.randn(parameter.shape, generator=generator) * INITIAL_DEVIATION
                parameter.data.copy_(noise)
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.dtype = self.start[self.trained[0]].dtype
        self.reference = "float64"
        """The precision of the reference gradients."""
        self.changed_frozen: set[str] = set()
        """Names of frozen parameters that a step has changed."""
        self.differ_between_ranks: set[str] = set()
        """Names of parameters that differed between ranks after a step."""
        self.buffers: dict[str, Tensor] = {}
        """The model's buffers after the latest step."""

    def examples(self) -> list[Examples]:
        """Return the per-sample gradients of each batch, computed in float64 if possible.

        Afterwards, the attribute `reference` names the precision, and the reason if it is float32.
        """
        try:
            return self._examples(torch.float64)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            self.reference = f"float32, because float64 fails: {first_line}"
            return self._examples(torch.float32)

    def _examples(self, dtype: torch.dtype) -> list[Examples]:
        def place(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        self.model.to(dtype)
        batches = [pytree.tree_map(place, batch) for batch in self.batches]
        # Gradients are enabled here, because a loss may itself compute gradients.
        once, again = (self._losses(self.model, batches[0]).detach() for _ in range(2))
        if not torch.equal(once, again):
            raise ConfigurationError(
                "the losses of a batch change each time they are computed, so no gradient can be "
                "verified: remove the randomness from the model and its losses"
            )
        return [Examples.computed(self.model, batch, self._losses) for batch in batches]

    def steps(
        self,
        case: Case,
        number: int,
        batches: Sequence[Batch],
        sigma: float = 1.0,
        threshold: float = 1.0,
        seed: int = 0,
    ) -> Iterator[Gradients]:
        """Yield the gradients with which each step updates the parameters.

        With SGD, the result is the update that the step subtracts, divided by the learning rate.
        With another optimizer, the result is the gradients that the optimizer receives. Each step
        starts from the initial parameters and trains the next batch, or this rank's part of the
        batch. All ranks use the same seed if ``seed`` is odd, and different seeds if it is even.
        Noise must be correct in both cases.
        """
        one_process = case.gpus == 1
        plain = case.optimizer == "sgd"
        options: dict[str, Any] = {
            "noise_multiplier": sigma,
            "max_grad_norm": threshold,
            "learning_rate": RATE,
        }
        trainer, _ = build(case, self.device, 1, seed=seed, alone=one_process, **options)
        if not one_process and seed % 2:
            torch.manual_seed(seed)
        model = without_dropout(trainer.model)
        parameters = {_name_in_model(name): p for name, p in model.named_parameters()}
        buffers = {_name_in_model(name): b for name, b in model.named_buffers()}
        if parameters.keys() != self.start.keys():
            other = sorted(parameters.keys() ^ self.start.keys())[0]
            raise ConfigurationError(
                f"{type(trainer).__name__} does not train the workload's model: only one of the "
                f"two models has the parameter {other}"
            )
        trained = {name: parameters[name] for name in self.trained}
        step_of = _update_of_sgd if plain else _update_of_other
        starts = {name: local_shard(self.start[name], p) for name, p in parameters.items()}
        before = {name: self.start[name].double() for name in trained}
        with torch.no_grad():
            for name in buffers.keys() & self._buffers.keys():  # initial buffers may be random
                buffers[name].copy_(self._buffers[name])
        for batch in islice(cycle(batches), number):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(starts[name])
            update = step_of(
                trainer, batch if one_process else part_of_this_rank(batch), trained, before
            )
            self.differ_between_ranks |= set() if one_process else names_that_differ(update)
            self.changed_frozen |= {
                name
                for name, parameter in parameters.items()
                if name not in trained and not torch.equal(gathered(parameter), self.start[name])
            }
            self.buffers = {name: b.detach().clone() for name, b in buffers.items()}
            yield update


def _name_in_model(name: str) -> str:
    """Remove the prefixes of wrappers from the name of a parameter or buffer."""
    return name.removeprefix("_module.").removeprefix("module.")


Parameters = Mapping[str, nn.Parameter]


def _update_of_sgd(trainer: Any, batch: Batch, trained: Parameters, before: Gradients) -> Gradients:
    """Take a step of plain SGD. Return the subtracted update, divided by the learning rate."""
    trainer.train_step(batch)
    return {name: (before[name] - value) / RATE for name, value in values_of(trained).items()}


def _update_of_other(
    trainer: Any, batch: Batch, trained: Parameters, before: Gradients
) -> Gradients:
    """Take a step. Return the gradients that the plain optimizer receives.

    Parameters that did not move get zeros. If a trainer merges the update with the noise, noisy
    gradients never exist in memory. In this case, the gradients are computed from the optimizer's
    moving averages, which are set to zero before the step.
    """
    optimizer = trainer.plain_optimizer
    received = {name: torch.zeros_like(value) for name, value in before.items()}
    seen = False

    def record_gradients(
        stepping: object, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        nonlocal seen
        if stepping is not optimizer:
            return
        # A closure would compute gradients only after this hook.
        seen = len(args) == 1 and options.get("closure") is None
        for name, p in trained.items():
            if p.grad is not None:
                received[name] += gathered(p.grad).double()

    for state in optimizer.state.values():
        if (average := _average_in(state)) is not None:
            average.zero_()
    # The hook is global: trainers may step differently if the optimizer itself has hooks.
    hook = register_optimizer_step_pre_hook(record_gradients)
    try:
        trainer.train_step(batch)
    finally:
        hook.remove()
    moved = {name for name, v in values_of(trained).items() if not torch.equal(before[name], v)}
    if moved and not seen:
        received = _gradients_from_averages(optimizer, trained)
    if moved and not received:
        raise ConfigurationError(
            f"{type(trainer).__name__} does not call plain_optimizer.step() without a closure, so "
            "verify can check it only with --optimizer sgd"
        )
    return {name: g * (name in moved) for name, g in received.items()}


def _average_in(state: Mapping[str, Any]) -> Tensor | None:
    average: Tensor | None = state.get("exp_avg", state.get("momentum_buffer"))
    return average


def _gradients_from_averages(
    optimizer: torch.optim.Optimizer, trained: Parameters
) -> dict[str, Tensor]:
    """Compute the gradients of one step from an optimizer's moving averages that began at zero.

    Return an empty dict if the optimizer has no such averages, or if its options, such as coupled
    weight decay, do not allow the computation.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found = {}
    for name, parameter in trained.items():
        average, group = _average_in(optimizer.state.get(parameter, {})), groups.get(parameter, {})
        decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
        if average is None or decays or group.get("dampening") or group.get("maximize"):
            return {}
        found[name] = gathered(average).double() / (1 - group.get("betas", (0.0,))[0])
    return found


def values_of(parameters: Parameters) -> dict[str, Tensor]:
    """Return whole parameters in float64, gathered from the ranks' shards."""
    return {name: gathered(p.detach()).double() for name, p in parameters.items()}


def local_shard(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a value, or the whole value of an unsharded parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def part_of_this_rank(batch: Batch) -> Batch:
    """Return the examples of a batch that this rank trains."""
    own = part_of_rank(examples_in(batch), *rank_and_ranks())
    return pytree.tree_map(lambda tensor: tensor[own], batch)


def names_that_differ(values: Gradients) -> set[str]:
    """Return the names of tensors whose elements are not equal in all ranks."""
    flat = torch.cat([value.flatten() for value in values.values()])
    least, most = flat.clone(), flat
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    same = (least == most).split([value.numel() for value in values.values()])
    return {name for name, equal in zip(values, same, strict=True) if not equal.all()}


def without_dropout(model: nn.Module) -> nn.Module:
    """Set the rate of dropout layers to 0, so that losses are reproducible."""
    for layer in model.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    return model
