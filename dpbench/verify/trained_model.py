"""Runs a trainer's steps, and computes the gradients with which each step updates parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from dpbench.child.build import build
from dpbench.core.case import BASELINE_TRAINER, MIXED, Case
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.parallel import gathered, part_of_rank, rank_and_ranks
from dpbench.verify.reference import Examples, Gradients
from dpbench.verify.update import (
    RATE,
    Parameters,
    Update,
    gradients_from_averages,
    local_shard,
    state_of,
    values_of,
    zero_averages,
)
from dpbench.workloads.base import examples_in

ONE_PROCESS: Mapping[str, Any] = MappingProxyType({"parallel": "none", "gpus": 1})
"""Values of the axes ``parallel`` and ``gpus`` of a case that trains in one process."""

FIRST_RUN_STEPS = 8
"""Number of steps of the first runs, enough to find noise that repeats every few steps, and a
trainer that changes after a few steps."""
LARGE_MODEL = 2**21
"""Number of trained elements above which the first runs of a model have fewer steps. The noise of
many steps would take gigabytes."""

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
        elements = sum(self.start[name].numel() for name in self.trained)
        self.first_steps = steps if elements > LARGE_MODEL else FIRST_RUN_STEPS
        self.reference = "float64"
        """The precision of the reference gradients."""
        self.changed_frozen: set[str] = set()
        """Names of frozen parameters that a step has changed."""
        self.differ_between_ranks: set[str] = set()
        """Names of parameters that differed between ranks after a step."""
        self.received: Gradients = {}
        """The gradients that an optimizer received in the latest step; empty if none stepped."""
        self.judges_received = False
        """Whether `steps` yields what the optimizer receives, although the optimizer is SGD."""
        self.keeps_weights = False
        """Whether the trainer copies weights of its own to the model, see `restores_weights`."""

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
        rate: float | None = None,
    ) -> Iterator[Gradients]:
        """Yield the gradients with which each step updates the parameters.

        With SGD, the result is the update that the step subtracts, divided by the learning rate.
        With another optimizer, or if `judges_received`, the result is the gradients that the
        optimizer receives. Each step starts from the initial parameters and trains the next batch,
        or this rank's part of the batch. All ranks use the same seed if ``seed`` is odd, and
        different seeds if it is even. Noise must be correct in both cases.

        ``rate`` is the learning rate. The default is `RATE`, or 1/`RATE` if `judges_received`, with
        which nothing moves parameters before their gradients are computed.
        """
        rate = rate or (1 / RATE if self.judges_received else RATE)
        options = {"noise_multiplier": sigma, "max_grad_norm": threshold, "learning_rate": rate}
        trainer, parameters = self._built(case, seed, **options)
        trained = {name: parameters[name] for name in self.trained}
        starts = {name: local_shard(self.start[name], p) for name, p in parameters.items()}
        before = {name: self.start[name].double() for name in trained}
        several = case.gpus > 1
        for batch in islice(cycle(batches), number):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(starts[name])
            own = part_of_this_rank(batch) if several else batch
            update = self._update(trainer, own, trained, before, plain=case.optimizer == "sgd")
            self.differ_between_ranks |= names_that_differ(update) if several else set()
            self.changed_frozen |= {
                name
                for name, parameter in parameters.items()
                if name not in trained and not torch.equal(gathered(parameter), self.start[name])
            }
            if self.keeps_weights:
                before = values_of(trained)
            yield update

    def _built(
        self, case: Case, seed: int, **options: Any
    ) -> tuple[TrainerBase, dict[str, nn.Parameter]]:
        """Build the trainer of a case, and return its parameters by their names in this model."""
        trainer, _ = build(case, self.device, 1, seed=seed, alone=case.gpus == 1, **options)
        if case.gpus > 1 and seed % 2:
            torch.manual_seed(seed)
        model = without_dropout(trainer.model)
        parameters = {name_in_model(name): p for name, p in model.named_parameters()}
        if parameters.keys() != self.start.keys():
            other = sorted(parameters.keys() ^ self.start.keys())[0]
            raise ConfigurationError(
                f"{type(trainer).__name__} does not train the workload's model: only one of the "
                f"two models has the parameter {other}"
            )
        with torch.no_grad():
            for name, buffer in _buffers(model).items():  # initial buffers may be random
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
        return trainer, parameters

    def _update(
        self,
        trainer: TrainerBase,
        batch: Batch,
        trained: Parameters,
        before: Gradients,
        *,
        plain: bool,
    ) -> Gradients:
        """Take a step, and return the gradients with which it updates the parameters.

        Parameters that an optimizer other than SGD did not move get zeros. If a trainer merges the
        update with the noise, noisy gradients never exist in memory. In this case, the gradients
        are computed from the optimizer's moving averages, which are set to zero before the step.

        Args:
            trainer: the trainer.
            batch: the batch, or this rank's part of it.
            trained: the trained parameters.
            before: their values before the step.
            plain: whether the optimizer of the case is plain SGD.
        """
        if not plain:
            zero_averages(trainer.plain_optimizer)
        update = self._latest = Update(trainer, trained, batch)
        self.received, rates, after = update.received, update.rates, values_of(trained)
        if self.judges_received and self.received:
            return self.received
        if plain:
            return {
                name: (before[name] - value) / (rates.get(name) or RATE)
                if rates.get(name) or name not in self.received
                else self.received[name]
                for name, value in after.items()
            }
        moved = {name for name, value in after.items() if not torch.equal(before[name], value)}
        received = self.received or {name: torch.zeros_like(value) for name, value in after.items()}
        if moved and not self.received:
            received = gradients_from_averages(trainer.plain_optimizer, trained)
        if moved and not received:
            raise ConfigurationError(
                f"{type(trainer).__name__} does not call plain_optimizer.step() without a closure, "
                "so verify can check it only with --optimizer sgd"
            )
        return {n: g * (n in moved or not rates.get(n, RATE)) for n, g in received.items()}

    def restores_weights(self, case: Case, batch: Batch) -> bool:
        """Return whether a step with a negligible learning rate undoes a change of parameters.

        Then the trainer keeps the weights itself, and copies them to the model.
        """
        trainer, parameters = self._built(case, 0, learning_rate=1 / RATE**3)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        changed = values_of(parameters)
        trainer.train_step(part_of_this_rank(batch) if case.gpus > 1 else batch)
        return any(
            bool((changed[name] - value > 0.5).any())
            for name, value in values_of(parameters).items()
        )

    def left(self, *, parameters: bool) -> dict[str, Tensor]:
        """Return what the latest step left behind: buffers, and the state of optimizers.

        ``parameters`` adds the trained parameters.
        """
        update = self._latest
        left = _buffers(update.trainer.model) | (dict(update.trained) if parameters else {})
        for optimizer in (update.trainer.plain_optimizer, update.optimizer):
            left |= state_of(optimizer, update.trained) if optimizer else {}
        return {name: gathered(each.detach()).clone() for name, each in left.items()}


def name_in_model(name: str) -> str:
    """Remove the prefixes of wrappers from the name of a parameter or buffer."""
    for wrapper in ("_module.", "module.", "_orig_mod."):
        name = name.removeprefix(wrapper)
    return name


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name_in_model(name): buffer for name, buffer in model.named_buffers()}


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
