"""The interface of a trainer: one model, one optimizer, one `train_step`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError
from dpbench.training.correlated_noise import INDEPENDENT, noise_weights
from dpbench.training.parallel import rank_and_ranks
from dpbench.workloads.base import (
    Batch,
    Workload,
    checked_losses,
    examples_in,
    part_sizes,
    parts_of,
)
from dpbench.workloads.transformer import Transformer, mean_cross_entropy

__all__ = ["Batch", "Momentum", "TrainerBase", "mean_cross_entropy"]

Momentum = partial(torch.optim.SGD, momentum=0.9)

PRIVATE: Mapping[str, str] = MappingProxyType({"clips": "flat", "noise": "in a phase of its own"})
"""The labels of most private trainers."""

DRAWN_BY = "noise drawn by"
"""The label of private trainers in parallel that says which ranks draw noise, and for what."""


class TrainerBase(ABC):
    """Trains ``model`` one batch at a time; the subclass says how.

    A subclass marks the parts of its step with `dpbench.phase`, and uses only `mean_loss` and
    `example_losses` of what it trains.

    Attributes:
        labels: what a reader must know to compare it with others, such as ``{"clips": "flat"}``;
            tables say where those of two trainers differ. An instance may override them.
        joint_batch_size: B of all ranks together; the gradient is the mean over it.
        part_size: the most examples that a forward may see.
        sizes: the numbers of examples in the parts of this batch, and
        examples: in the part that is trained now, both by `parts`.

    Args:
        model: the workload's model.
        batch_size: examples in every batch, B; with several ranks, in each rank's part. A DP
            trainer scales its noise by the joint size. Of Poisson batches, the expected number.
        learning_rate: step size of the optimizer.
        noise_multiplier: σ; the noise added to the summed gradient has deviation σ·C.
        max_grad_norm: C, the threshold to which each example's gradient is clipped.
        optimizer: called as ``optimizer(parameters, lr=…)``; SGD without momentum by default.
        workload: gives the losses; by default those of the transformer, whose batches are
            ``(input_ids, labels)``, both int64 ``[B, T]``, labels aligned with positions.
        micro_batches: equal parts in which a batch is trained, gradients accumulating: `parts`.
        compile: compile the model and its loss as one function.
        noise: ``independent`` in each step, or ``banded``: correlated over steps; ``bands`` and
            ``noise_steps`` are the arguments of `dpbench.training.correlated_noise.noise_weights`.
        sampling: ``fixed``, or ``poisson``: batches have any number of examples, 0 included.
        autocast: the 16-bit type that ``torch.autocast`` computes losses in, if any; with
            float16, ``scaler`` scales them.
        parallel: how ranks share a step, see `dpbench.core.case.PARALLELS`; each trains
            ``batch_size`` examples.
    """

    labels: Mapping[str, str] = MappingProxyType({})
    in_graphs = False
    """Whether its steps are CUDA graphs on a GPU, so that they do not wait for Python."""
    replays = False
    """Whether the last step repeated a recorded forward, which Python no longer calls."""
    compiles: bool = True
    """Whether model and loss can be compiled."""
    correlates = False
    """Whether its noise has `noise_weights`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        learning_rate: float = 1e-3,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        workload: Workload | None = None,
        micro_batches: int = 1,
        autocast: torch.dtype | None = None,
        parallel: str = "none",
        sampling: str = "fixed",
        compile: bool = False,
        noise: str = "independent",
        bands: int = 1,
        noise_steps: int = 1000,
    ) -> None:
        check_numbers(batch_size, micro_batches, noise_multiplier, max_grad_norm, learning_rate)
        self.autocast = autocast
        self.device_type = next((p.device.type for p in model.parameters()), "cpu")
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=autocast is torch.float16)
        self.micro_batches = micro_batches
        self.workload = workload or Transformer()
        self.parallel = parallel
        self.sampling = sampling
        self.batch_size = batch_size
        self.part_size = self.examples = batch_size // micro_batches
        self.sizes = [self.part_size] * micro_batches
        ranks = 1 if parallel == "none" else rank_and_ranks()[1]
        self.joint_batch_size = batch_size * ranks
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.noise_weights = noise_weights(noise, bands, noise_steps)
        if self.noise_weights != INDEPENDENT:
            if not self.correlates or parallel != "none":
                where = "" if parallel == "none" else f" under parallel={parallel}"
                raise ConfigurationError(f"{type(self).__name__} adds no banded noise{where}")
            self.labels = {**self.labels, "noise correlated over": f"{bands} steps"}
        self.model = self.spread(model.train())
        if compile:
            if not self.compiles:
                raise ConfigurationError(
                    f"{type(self).__name__} does not train under compile=on: it needs hooks on "
                    f"layers, or torch.func, around what would be compiled"
                )
            for name in ("mean_loss", "example_losses"):
                setattr(self, name, torch.compile(getattr(self, name)))
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.plain_optimizer = optimizer(trained, lr=learning_rate)

    def spread(self, model: nn.Module) -> nn.Module:
        """The model as ``parallel`` spreads it over the ranks; here, on one."""
        if self.parallel != "none":
            raise self.refusal("its spread(model) must say how ranks share a model")
        return model

    def refusal(self, why: str) -> ConfigurationError:
        """The error of a trainer that does not train as ``parallel`` says."""
        name = type(self).__name__
        return ConfigurationError(f"{name} does not train under parallel={self.parallel}: {why}")

    @abstractmethod
    def train_step(self, batch: Batch) -> Tensor:
        """One optimization step.

        Args:
            batch: of the workload, with ``batch_size`` examples; of Poisson batches, with any
                number.

        Returns:
            The mean loss over the batch before the update, detached, a scalar; NaN without example.
        """

    def example_losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The loss of each example, ``[B]``, through the model or what wraps it."""
        with self.mixed():
            losses = self.workload.losses(model, batch)
        return checked_losses(losses, self.workload, batch)

    def mean_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The mean loss over the batch, a scalar, through the model or what wraps it."""
        if type(self.workload).loss is Workload.loss:
            return self.example_losses(model, batch).mean()
        with self.mixed():
            return self.workload.loss(model, batch)

    def mixed(self) -> AbstractContextManager[object]:
        """The context in which losses are computed: autocast, if it was asked for."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def parts(self, batch: Batch) -> Iterator[tuple[bool, Batch]]:
        """The micro-batches of a batch, each with whether it is the last; usually one.

        A batch must have the size that this trainer was built for. DP noise is scaled by that: a
        smaller last batch would silently get the wrong noise.

        Poisson batches have any size. One of more than ``part_size`` examples comes in as few parts
        as possible, sizes differing by at most 1, as from Opacus's ``BatchMemoryManager``. An empty
        one has no part: a private trainer still adds noise and updates.
        """
        examples = examples_in(batch)
        if self.sampling == "fixed" and examples != self.batch_size:
            raise ValueError(
                f"{type(self).__name__} was built for batches of {self.batch_size} "
                f"and got one of {examples}"
            )
        self.sizes = part_sizes(examples, -(-examples // self.part_size))
        for number, part in enumerate(parts_of(batch, self.sizes), 1):
            self.examples = self.sizes[number - 1]
            yield number == len(self.sizes), part


def check_numbers(
    batch_size: int,
    micro_batches: int,
    noise_multiplier: float,
    max_grad_norm: float,
    learning_rate: float,
) -> None:
    """Refuse numbers with which a step would not be private, or would drop examples."""
    named = {
        "max_grad_norm": max_grad_norm,
        "noise_multiplier": noise_multiplier,
        "learning_rate": learning_rate,
    }
    for name, value in named.items():
        if isinstance(value, str):  # a parameter of a name, such as dpsgd:max_grad_norm=nan
            raise ConfigurationError(f"{name} is {value!r}, and must be a finite number")
    parts = micro_batches > 0 and batch_size % micro_batches == 0
    for name, value, right, must in (
        ("max_grad_norm", max_grad_norm, 0 < max_grad_norm < math.inf, "be finite and above 0"),
        ("noise_multiplier", noise_multiplier, 0 <= noise_multiplier < math.inf,
         "be finite and not below 0 (0 is no noise)"),
        ("micro_batches", micro_batches, parts, f"divide the batch size, {batch_size}"),
    ):  # fmt: skip
        if not right:
            raise ConfigurationError(f"{name} is {value}, and must {must}")


def check_optimizer(name: str, made: Callable[..., torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that cannot step, or to which a parameter means something else."""
    try:
        parameter = torch.zeros(1, 1, requires_grad=True)
        parameter.grad = torch.zeros(1, 1)
        made([parameter], lr=1e-3).step()
    except Exception as error:  # its author chooses
        words = " ".join(str(error).split())
        raise ConfigurationError(f"optimizer {name} cannot step: {words}") from error


def mean_of(losses: Sequence[Tensor], sizes: Sequence[int] = ()) -> Tensor:
    """The mean loss of parts with these numbers of examples; by default all have as many.

    A single loss is returned without any operation; without losses, NaN.
    """
    if len(losses) == 1:
        return losses[0]
    if len({*sizes}) <= 1:
        return torch.stack([*losses]).mean() if losses else torch.full((), math.nan)
    weighted = [loss * (size / sum(sizes)) for loss, size in zip(losses, sizes, strict=True)]
    return torch.stack(weighted).sum()
