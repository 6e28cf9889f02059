"""The interface of trainers. A trainer updates one model with one optimizer, step by step."""

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
from dpbench.core.registry import check_class
from dpbench.training.correlated_noise import INDEPENDENT, weights_of
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
"""Labels of private trainers, unless a trainer sets other labels."""

DRAWN_BY = "noise drawn by"
"""Name of the label that says which rank draws which part of the noise."""


OPTIMIZER = "an optimizer is a subclass of torch.optim.Optimizer, called as Optimizer(params, lr=…)"
"""End of the error message about a class that is no optimizer."""


class TrainerBase(ABC):
    """Base class of trainers. A trainer trains ``model`` one batch at a time.

    A subclass marks the phases of its step with `dpbench.phase`. It computes losses only through
    `mean_loss` and `example_losses`, so that it works with every workload.

    Attributes:
        labels: what a reader must know to compare two trainers, such as ``{"clips": "flat"}``.
            Tables name the labels in which trainers differ. An instance may override the labels.
        joint_batch_size: B × number of ranks. A private trainer sums clipped gradients over all
            ranks, and divides the sum by this number.
        part_size: the largest number of examples in a micro-batch.
        sizes: number of examples in each micro-batch of the current batch. `parts` sets this list.
        examples: number of examples in the current micro-batch. `parts` sets this number.

    Args:
        model: the workload's model.
        batch_size: B, the number of examples in each batch. With several ranks, it is the number in
            each rank's part. With Poisson sampling, it is the expected number.
        learning_rate: step size of the optimizer.
        noise_multiplier: σ. Independent noise in the sum of clipped gradients has standard
            deviation σ·C. Noise that is correlated over steps has a larger deviation.
        max_grad_norm: C, the threshold to which each example's gradient is clipped.
        optimizer: called as ``optimizer(parameters, lr=…)``. The default is SGD without momentum.
        workload: computes the losses. The default is the transformer, whose batches are pairs
            ``(input_ids, labels)`` of int64 tensors ``[B, T]``.
        micro_batches: number of equal parts of a batch, over which gradients accumulate. With
            Poisson sampling, the number of parts varies, see `parts`.
        compile: whether to compile the model and its loss as one function.
        noise: ``independent`` noise in each step, or ``banded`` noise, which is correlated over
            steps.
        bands: see `dpbench.training.correlated_noise.weights_of`.
        noise_steps: the argument ``steps`` of `dpbench.training.correlated_noise.weights_of`. If
            noise is correlated, a later step raises `ConfigurationError`.
        sampling: ``fixed``, or ``poisson`` for batches with any number of examples, including 0.
        autocast: ``torch.bfloat16`` to compute the losses under ``torch.autocast``; None for no
            autocast.
        parallel: how ranks share a step, see `dpbench.core.case.PARALLELS`.
        seed: makes the noise of dpbench's trainers repeatable, and therefore not private: a
            restart with the same seed adds the same noise to other gradients. All ranks use the
            seed of rank 0. None draws a new key from the operating system.
    """

    labels: Mapping[str, str] = MappingProxyType({})
    in_graphs = False
    """Whether the trainer tries to run its steps as CUDA graphs on a GPU."""
    replays = False
    """Whether the last step replayed CUDA graphs, so that Python did not call the model."""
    compiles: bool = True
    """Whether the model and the loss can be compiled."""
    noises: tuple[str, ...] = ("independent",)
    """Kinds of noise that the trainer can add, from `dpbench.training.correlated_noise.NOISES`."""

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
        seed: int | None = None,
    ) -> None:
        check_numbers(batch_size, micro_batches, noise_multiplier, max_grad_norm, learning_rate)
        if autocast is torch.float16:
            raise ConfigurationError(
                "float16 needs a GradScaler, which would scale gradients before they are clipped: "
                "use torch.bfloat16"
            )
        self.autocast = autocast
        self.device_type = next((p.device.type for p in model.parameters()), "cpu")
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
        self.seed, self.noise_steps = seed, noise_steps
        self.noise_weights = weights_of(noise, bands, noise_steps)
        if self.noise_weights != INDEPENDENT:
            if noise not in self.noises or parallel != "none":
                where = "" if parallel == "none" else f" under parallel={parallel}"
                supported = "independent" if where else " or ".join(self.noises)
                raise ConfigurationError(
                    f"{type(self).__name__} adds no {noise} noise{where}; use noise={supported}"
                )
            self.labels = {**self.labels, "noise correlated over": f"{bands} steps"}
        self.model = self.distribute(model.train())
        if compile:
            if not self.compiles:
                raise ConfigurationError(
                    f"{type(self).__name__} does not train under compile=on: compiled code would "
                    f"lack the trainer's hooks on layers, or its transforms of torch.func"
                )
            for name in ("mean_loss", "example_losses"):
                setattr(self, name, torch.compile(getattr(self, name)))
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.plain_optimizer = optimizer(trained, lr=learning_rate)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Return the model, distributed over the ranks. The base class refuses several ranks."""
        if self.parallel != "none":
            raise self.refusal("the trainer does not override distribute(model)")
        return model

    def refusal(self, why: str) -> ConfigurationError:
        """Return an error that says why this trainer does not train under ``parallel``."""
        name = type(self).__name__
        return ConfigurationError(f"{name} does not train under parallel={self.parallel}: {why}")

    @abstractmethod
    def train_step(self, batch: Batch) -> Tensor:
        """Take one training step.

        Args:
            batch: a batch of the workload with ``batch_size`` examples, or with any number of
                examples under Poisson sampling.

        Returns:
            The mean loss over the batch before the update, a detached scalar; NaN for an empty
            batch.
        """

    def example_losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return each example's loss, ``[B]``. Callers may pass a wrapper of the model."""
        with self.autocast_context():
            losses = self.workload.losses(model, batch)
        return checked_losses(losses, self.workload, batch)

    def mean_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the batch's mean loss. Callers may pass a wrapper of the model."""
        if type(self.workload).loss is Workload.loss:
            return self.example_losses(model, batch).mean()
        with self.autocast_context():
            return self.workload.loss(model, batch)

    def autocast_context(self) -> AbstractContextManager[object]:
        """Return the context in which losses are computed, with autocast if ``autocast`` is set."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def parts(self, batch: Batch) -> Iterator[tuple[bool, Batch]]:
        """Yield a pair for each micro-batch of a batch: whether it is the last, and its data.

        With fixed sampling, the batch must have ``batch_size`` examples. A private trainer scales
        its noise for this number, so a smaller batch would silently get the wrong noise.

        With Poisson sampling, the batch may have any size. A batch with more than ``part_size``
        examples is split into as few micro-batches as possible, whose sizes differ by at most 1, as
        Opacus's ``BatchMemoryManager`` does. For an empty batch, nothing is yielded, but a private
        trainer still adds noise and updates the parameters.
        """
        examples = examples_in(batch)
        if self.sampling == "fixed" and examples != self.batch_size:
            raise ValueError(
                f"{type(self).__name__} was built for batches of {self.batch_size} examples, "
                f"and this batch has {examples}"
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
    """Raise if an argument is out of range, or is text, or if micro-batches would differ in size.

    This function accepts every number as learning rate.
    """
    named = {
        "max_grad_norm": max_grad_norm,
        "noise_multiplier": noise_multiplier,
        "learning_rate": learning_rate,
    }
    for name, value in named.items():
        if isinstance(value, str):  # from a trainer's name, such as dpsgd:max_grad_norm=nan
            raise ConfigurationError(f"{name} is {value!r}, and must be a finite number")
    parts = micro_batches > 0 and batch_size % micro_batches == 0
    for name, value, right, must in (
        ("max_grad_norm", max_grad_norm, 0 < max_grad_norm < math.inf, "be finite and above 0"),
        ("noise_multiplier", noise_multiplier, 0 <= noise_multiplier < math.inf,
         "be finite and not below 0 (0 means no noise)"),
        ("micro_batches", micro_batches, parts, f"divide the batch size, {batch_size}"),
    ):  # fmt: skip
        if not right:
            raise ConfigurationError(f"{name} is {value}, and must {must}")


def check_optimizer(name: str, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Raise if an optimizer cannot be built for one 1 × 1 parameter, or cannot take a step."""
    check_class(f"optimizer {name}", optimizer, torch.optim.Optimizer, OPTIMIZER)
    try:
        parameter = torch.zeros(1, 1, requires_grad=True)
        parameter.grad = torch.zeros(1, 1)
        optimizer([parameter], lr=1e-3).step()
    except Exception as error:  # a user's optimizer can raise anything
        words = " ".join(str(error).split())
        raise ConfigurationError(f"optimizer {name} cannot step: {words}") from error


def mean_of(losses: Sequence[Tensor], sizes: Sequence[int] = ()) -> Tensor:
    """Return the mean loss of all examples from the mean losses of parts; NaN without parts.

    Args:
        losses: the mean loss of each part.
        sizes: number of examples in each part. By default, all parts are equally large.
    """
    if len(losses) == 1:
        return losses[0]
    if len({*sizes}) <= 1:
        return torch.stack([*losses]).mean() if losses else torch.full((), math.nan)
    weighted = [loss * (size / sum(sizes)) for loss, size in zip(losses, sizes, strict=True)]
    return torch.stack(weighted).sum()
