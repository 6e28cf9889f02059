"""DP-SGD: every per-sample gradient is materialised, then clipped.

The algorithm is that of Abadi et al., "Deep Learning with Differential Privacy" (2016),
https://arxiv.org/abs/1607.00133, as Opacus implements it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import wrap_model
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer, get_optimizer_class
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.training.base import DRAWN_BY, PRIVATE, Batch, TrainerBase, mean_of
from dpbench.training.correlated_noise import NOISES
from dpbench.training.kept_noise import KeptNoise
from dpbench.training.phases import in_phase, phase
from dpbench.training.refusals import ONLY_GHOST, check_layers, refusals


def mark_phases(optimizer: DPOptimizer) -> None:
    """Mark the phases inside ``optimizer.step()``.

    Opacus clips, adds noise and updates inside one call. Its methods are wrapped and the call
    stays, so that Opacus itself is measured.
    """
    for method, name in (
        ("clip_and_accumulate", "clip"),  # flat clipping
        ("accumulate", "clip"),  # fast gradient clipping: sums gradients that are already clipped
        ("add_noise", "noise"),
        ("scale_grad", "noise"),
    ):
        if hasattr(optimizer, method):
            setattr(optimizer, method, in_phase(name, getattr(optimizer, method)))


def correlate_noise(optimizer: DPOptimizer, kept: KeptNoise) -> None:
    """Make an optimizer of Opacus add correlated noise to each parameter."""
    deviation = optimizer.noise_multiplier * optimizer.max_grad_norm

    def add_noise() -> None:
        for parameter in optimizer.params:
            total = parameter.summed_grad
            _check_processed_flag(total)
            noise = torch.zeros_like(total, memory_format=torch.contiguous_format)
            kept.add_to(noise, deviation, parameter, optimizer.generator)
            parameter.grad = (total + noise).view_as(parameter)
            _mark_as_processed(total)

    optimizer.add_noise = add_noise


class OpacusTrainer(TrainerBase):
    """The base of all Opacus trainers; arguments as `TrainerBase`.

    A subclass chooses the wrapper of the model, and Opacus's optimizer. With several ranks Opacus
    chooses the optimizer by the clipping and the ``grad_sample_mode``.
    """

    labels = PRIVATE
    compiles = False
    noises: tuple[str, ...] = NOISES
    clip = "flat"
    mode: str | None = None  # Opacus's grad_sample_mode, if one does the same
    optimizer_class: type[DPOptimizer] = DPOptimizer

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        check_layers(model)
        super().__init__(model, batch_size=batch_size, **options)
        if self.autocast is torch.float16:
            raise ConfigurationError(
                "Opacus clips gradients as a GradScaler has scaled them, all of them down to the "
                "threshold, and fp16-amp needs one: use bf16-amp"
            )
        self.grad_sample_module = self.wrapped()
        self.optimizer = self.private_optimizer()
        if len(self.noise_weights) > 1:
            correlate_noise(self.optimizer, KeptNoise(self.mechanism))
        mark_phases(self.optimizer)

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel == "fsdp2":
            raise self.refusal(ONLY_GHOST)
        if self.parallel == "none" or self.mode is None:
            return super().distribute(model)
        self.labels = {**self.labels, DRAWN_BY: "rank 0"}
        self.optimizer_class = self.distributed_optimizer(self.mode)
        replica: nn.Module = DifferentiallyPrivateDistributedDataParallel(model)
        return replica

    def distributed_optimizer(self, mode: str) -> type[DPOptimizer]:
        """Opacus's optimizer class for several ranks; an error with Opacus's message if none."""
        try:
            found: type[DPOptimizer] = get_optimizer_class(self.clip, True, mode)
        except ValueError as error:
            raise self.refusal(f"Opacus says {str(error)!r}; use grad_sample=hooks") from error
        return found

    @abstractmethod
    def wrapped(self) -> nn.Module:
        """The model with Opacus's hooks."""

    def private_optimizer(self) -> DPOptimizer:
        """The optimizer that clips and adds noise."""
        return self.optimizer_class(
            self.plain_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=self.batch_size,
        )

    def private_loss(self, batch: Batch) -> Any:
        """A loss whose ``backward()`` leaves on the parameters what the optimizer clips."""
        return self.mean_loss(self.grad_sample_module, batch)

    def backward(self, loss: Any) -> None:
        """Run backward from what `private_loss` returned."""
        loss.backward()

    def train_step(self, batch: Batch) -> Tensor:
        with refusals(self.model):
            losses = [self.train_part(part, last) for last, part in self.parts(batch)]
            if not losses:
                self.train_nothing()
            return mean_of(losses, self.sizes)

    def train_part(self, part: Batch, last: bool) -> Tensor:
        """Clip a micro-batch; with the last, add noise and update. Returns its mean loss."""
        with phase("forward"):
            loss = self.private_loss(part)
            mean: Tensor = loss.detach()  # with fast gradient clipping, ``detach`` takes the mean
        with phase("backward"):
            self.backward(loss)
        with phase("optimizer"):
            if not last:  # as Opacus's BatchMemoryManager does it
                self.optimizer.signal_skip_step()
            self.optimizer.step()  # with phases clip and, if last, noise: mark_phases
            self.optimizer.zero_grad(set_to_none=True)
        return mean

    def leave_nothing(self, parameter: Any) -> None:
        """Set on a parameter what backward would leave for an empty batch."""
        parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)

    def train_nothing(self) -> None:
        """Update by noise alone, as after an empty batch."""
        with phase("optimizer"):
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    self.leave_nothing(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


CLIPPING = ("flat", "per_layer")
GRAD_SAMPLES = ("hooks", "functorch", "ew")


class DPSGDTrainer(OpacusTrainer):
    """DP-SGD that keeps the per-sample gradients of all parameters, and then clips them.

    Args:
        clip: ``flat`` clips an example's whole gradient to C. ``per_layer`` clips its gradient of
            each of n parameters to C/√n, so that the whole gradient is at most C and the noise is
            that of flat clipping.
        grad_sample: how per-sample gradients are made. ``hooks``: by a rule for each kind of
            layer. ``functorch``: by ``vmap`` of ``grad`` for every layer. ``ew``: by PyTorch's
            expanded weights.
        options: as `TrainerBase`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        clip: str = "flat",
        grad_sample: str = "hooks",
        **options: Any,
    ) -> None:
        for name, value, known in (
            ("clip", clip, CLIPPING),
            ("grad_sample", grad_sample, GRAD_SAMPLES),
        ):
            if value not in known:
                raise unknown(name, value, known)
        self.clip, self.grad_sample, self.mode = clip, grad_sample, grad_sample
        self.labels = {**PRIVATE, "clips": clip.replace("_", " ")}
        super().__init__(model, batch_size=batch_size, **options)

    def wrapped(self) -> nn.Module:
        if self.grad_sample == "ew" and self.autocast:
            raise ConfigurationError(
                "expanded weights (grad_sample=ew) don't work under autocast: use grad_sample=hooks"
            )
        model: nn.Module = wrap_model(self.model, grad_sample_mode=self.grad_sample)
        return model

    def private_optimizer(self) -> DPOptimizer:
        if self.clip == "flat":
            return super().private_optimizer()
        number = sum(len(group["params"]) for group in self.plain_optimizer.param_groups)
        per_layer = DPPerLayerOptimizer if self.parallel == "none" else self.optimizer_class
        return per_layer(
            self.plain_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=[self.max_grad_norm / number**0.5] * number,
            expected_batch_size=self.batch_size,
        )
