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
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from dpbench.child.build import build
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.correlated_noise import INDEPENDENT
from dpbench.training.parallel import gathered, part_of_rank, rank_and_ranks
from dpbench.verify.reference import Examples, Gradients
from dpbench.workloads.base import examples_in, parts_of

ONE_PROCESS: Mapping[str, Any] = MappingProxyType({"parallel": "none", "gpus": 1})
"""Values of the axes ``parallel`` and ``gpus`` of a case that trains in one process."""

RATE = 2.0**30
"""Learning rate of the checked steps. With SGD, the update is computed as (value before the step -
value after the step) / `RATE`. The rate is so large that rounding the new value hardly changes this
result."""

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

MIXED_BY = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference from which on an example's loss depends on the other examples."""

Parameters = Mapping[str, nn.Parameter]


class TrainedModel:
    """A case's model, initial parameters, batches and reference gradients.

    Attributes:
        reference: the precision of the reference gradients.
        mixed: how the loss of an example depends on the other examples of its batch; empty if it
            does not.
        changed_frozen: names of frozen parameters that a step has changed.
        differ_between_ranks: names of parameters that differed between ranks after a step.
        received: the gradients that an optimizer received in the latest step; empty if none
            stepped.
        judges_received: whether `steps` yields what the optimizer receives, although the optimizer
            is SGD.
        keeps_weights: whether the trainer copies weights of its own to the model, see
            `restores_weights`.
    """

    def __init__(self, case: Case, device: torch.device, steps: int) -> None:
        precision = "bf16" if case.precision == "bf16" else "fp32"
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
        self.reference, self.mixed = "float64", ""
        self.changed_frozen: set[str] = set()
        self.differ_between_ranks: set[str] = set()
        self.received: Gradients = {}
        self.judges_received = self.keeps_weights = False

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
        try:
            each = parts_of(batches[0], [1] * examples_in(batches[0]))
            alone = torch.cat([self._losses(self.model, example).detach() for example in each])
        except ValueError as error:  # such as that of BatchNorm over one value
            raise ConfigurationError(
                f"the model does not run with one example ({error}), so what an example adds to a "
                f"gradient is not known, and no trainer can be verified on this model"
            ) from error
        near = MIXED_BY[dtype]
        if (differ := ~torch.isclose(once, alone, near, near)).any():
            i = int(differ.nonzero()[0])
            self.mixed = (
                f"the loss of example {i} is {float(alone[i]):.4g} alone and {float(once[i]):.4g} "
                f"in its batch, so the model or its loss mixes examples, and the trainer trains it"
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
        repeatable: bool = True,
    ) -> Iterator[Gradients]:
        """Yield the gradients with which each step updates the parameters.

        With SGD, the result is the update that the step subtracts, divided by the learning rate.
        With another optimizer, or if `judges_received`, the result is the gradients that the
        optimizer receives. Each step starts from the initial parameters and trains the next batch,
        or this rank's part of the batch. All ranks use the same seed if ``seed`` is odd, and
        different seeds if it is even. Noise must be correct in both cases.

        ``rate`` is the learning rate. The default is `RATE`, or 1/`RATE` if `judges_received`, with
        which nothing moves parameters before their gradients are computed. With ``repeatable``, the
        trainer gets a seed, see `dpbench.child.build.build`. If noise is correlated, there are no
        more steps than it was made for.
        """
        rate = rate or (1 / RATE if self.judges_received else RATE)
        options = {"noise_multiplier": sigma, "max_grad_norm": threshold, "learning_rate": rate}
        trainer, parameters = self.built(case, seed, repeatable=repeatable, **options)
        if len(getattr(trainer, "noise_weights", INDEPENDENT)) > 1:
            number = min(number, trainer.noise_steps)
        trained = {name: parameters[name] for name in self.trained}
        starts = {name: _local_shard(self.start[name], p) for name, p in parameters.items()}
        before = {name: self.start[name].double() for name in trained}
        for batch in islice(cycle(batches), number):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(starts[name])
            update = self._update(trainer, _of_this_rank(batch, case), trained, before)
            if case.gpus > 1:
                self.differ_between_ranks |= _names_that_differ(update)
            self.changed_frozen |= {
                name
                for name, parameter in parameters.items()
                if name not in trained and not torch.equal(gathered(parameter), self.start[name])
            }
            if self.keeps_weights:
                before = _values_of(trained)
            yield update

    def built(
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
        self, trainer: TrainerBase, batch: Batch, trained: Parameters, before: Gradients
    ) -> Gradients:
        """Take a step, and return the gradients with which it updates the parameters.

        Parameters that an optimizer other than SGD did not move get zeros. If a trainer merges the
        update with the noise, noisy gradients never exist in memory. In this case, the gradients
        are computed from the optimizer's moving averages, which are set to zero before the step.
        ``before`` has the values of the trained parameters before the step.
        """
        own, plain = trainer.plain_optimizer, self.case.optimizer == "sgd"
        for average in () if plain else _averages(own).values():
            average.zero_()
        step = self._latest = _Step(trainer, trained, batch)
        self.received, rates, after = step.received, step.rates, _values_of(trained)
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
            received = _gradients_from_averages(own, trained)
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
        trainer, parameters = self.built(case, 0, learning_rate=1 / RATE**3)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        changed = _values_of(parameters)
        trainer.train_step(_of_this_rank(batch, case))
        after = _values_of(parameters)
        return any(bool((value - after[name] > 0.5).any()) for name, value in changed.items())

    def left(self, *, parameters: bool) -> dict[str, Tensor]:
        """Return what the latest step left behind: buffers, and the state of optimizers.

        ``parameters`` adds the trained parameters.
        """
        step = self._latest
        left = _buffers(step.trainer.model) | (dict(step.trained) if parameters else {})
        for optimizer in filter(None, (step.trainer.plain_optimizer, step.optimizer)):
            for name, p in step.trained.items():
                state = optimizer.state.get(p, {}).items()
                left |= {f"{key} of {name}": v for key, v in state if isinstance(v, Tensor)}
        return {name: gathered(each.detach()).clone() for name, each in left.items()}


class _Step:
    """One step of a trainer, and what an optimizer received in it.

    Attributes:
        optimizer: the optimizer that stepped: ``plain_optimizer``, or else another optimizer with
            trained parameters. It is None if none stepped, or if it stepped with a closure.
        received: the gradients that this optimizer received, by parameter.
        rates: the learning rate of each parameter in this optimizer, or else in
            ``plain_optimizer`` before the step.
    """

    def __init__(self, trainer: TrainerBase, trained: Parameters, batch: Batch) -> None:
        """Take the step."""
        self.trainer, self.trained = trainer, trained
        self.optimizer: Optimizer | None = None
        self.received: dict[str, Tensor] = {}
        groups = _groups_by_name(trainer.plain_optimizer, trained)
        self.rates = {name: float(group["lr"]) for name, group in groups.items()}
        # The hook is global: trainers may step differently if the optimizer itself has hooks.
        hook = register_optimizer_step_pre_hook(self._receive)
        try:
            trainer.train_step(batch)
        finally:
            hook.remove()

    def _receive(self, stepping: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        groups = _groups_by_name(stepping, self.trained)
        # A closure would compute gradients only after this hook.
        closure = len(args) > 1 or options.get("closure") is not None
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not groups or closure or capturing:
            return
        if stepping is not self.optimizer:
            if self.optimizer is self.trainer.plain_optimizer:
                return
            self.optimizer = stepping
            self.received = {n: torch.zeros_like(v) for n, v in _values_of(self.trained).items()}
        for name, group in groups.items():
            self.rates[name] = float(group["lr"])
            if (gradient := self.trained[name].grad) is not None:
                self.received[name] += gathered(gradient).double()


def _groups_by_name(optimizer: Optimizer, trained: Parameters) -> dict[str, dict[str, Any]]:
    """Return the parameter group of each trained parameter that an optimizer has."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[id(p)] for name, p in trained.items() if id(p) in groups}


def _averages(optimizer: Optimizer) -> dict[Any, Tensor]:
    """Return the moving average of gradients that an optimizer keeps for each parameter, if any."""
    found = {p: s.get("exp_avg", s.get("momentum_buffer")) for p, s in optimizer.state.items()}
    return {p: average for p, average in found.items() if average is not None}


def _gradients_from_averages(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """Compute the gradients of one step from an optimizer's moving averages that began at zero.

    Return an empty dict if the optimizer has no such averages, or if its options, such as coupled
    weight decay, do not allow the computation.
    """
    averages, groups = _averages(optimizer), _groups_by_name(optimizer, trained)
    found = {}
    for name, parameter in trained.items():
        group = groups.get(name, {})
        decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
        unknown = decays or group.get("dampening") or group.get("maximize")
        if unknown or parameter not in averages:
            return {}
        average = gathered(averages[parameter]).double()
        found[name] = average / (1 - group.get("betas", (0.0,))[0])
    return found


def _values_of(parameters: Parameters) -> dict[str, Tensor]:
    """Return whole parameters in float64, gathered from the ranks' shards."""
    return {name: gathered(p.detach()).double() for name, p in parameters.items()}


def _local_shard(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a value, or the whole value of an unsharded parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def name_in_model(name: str) -> str:
    """Remove the prefixes of wrappers from the name of a parameter or buffer."""
    for wrapper in ("_module.", "module.", "_orig_mod."):
        name = name.removeprefix(wrapper)
    return name


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name_in_model(name): buffer for name, buffer in model.named_buffers()}


def _of_this_rank(batch: Batch, case: Case) -> Batch:
    """Return the examples of a batch that this rank trains, if the case has several ranks."""
    if case.gpus == 1:
        return batch
    own = part_of_rank(examples_in(batch), *rank_and_ranks())
    return pytree.tree_map(lambda tensor: tensor[own], batch)


def _names_that_differ(values: Gradients) -> set[str]:
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
