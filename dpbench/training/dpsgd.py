"""DP-SGD as Opacus implements it, with or without per-sample gradients in memory.

`DPSGDTrainer` keeps all per-sample gradients in memory, and then clips them (Abadi et al., "Deep
Learning with Differential Privacy", 2016, https://arxiv.org/abs/1607.00133). The other trainers run
two backward passes. The first pass computes the norm of each example's gradient. The second pass
computes the gradient of the weighted sum of losses, whose weights are the clipping factors. So
per-sample gradients need not be kept (Lee and Kifer, https://arxiv.org/abs/2009.03106). Ghost
clipping computes the norms of linear layers and embeddings without per-sample gradients (Li et al.,
https://arxiv.org/abs/2110.05679).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModuleFastGradientClipping, wrap_model
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.optimizers import (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    get_optimizer_class,
)
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.utils import fsdp_utils
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.training.base import DRAWN_BY, PRIVATE, Batch, TrainerBase, mean_of
from dpbench.training.correlated_noise import NOISES, CorrelatedNoise
from dpbench.training.parallel import mesh_of_all, own_generator
from dpbench.training.phases import in_phase, phase
from dpbench.training.refusals import (
    ONLY_GHOST,
    check_layers,
    check_rows,
    refusals,
    refuse_strided_inputs,
)


def mark_phases(optimizer: DPOptimizer) -> None:
    """Mark the phases inside ``optimizer.step()``, in which Opacus clips, adds noise and updates.

    The optimizer's methods are wrapped, and still run Opacus's code.
    """
    for method, name in (
        ("clip_and_accumulate", "clip"),  # flat and per-layer clipping
        ("accumulate", "clip"),  # fast gradient clipping, which sums clipped gradients here
        ("add_noise", "noise"),
        ("scale_grad", "noise"),
    ):
        if hasattr(optimizer, method):
            setattr(optimizer, method, in_phase(name, getattr(optimizer, method)))


def correlate_noise(optimizer: DPOptimizer, weights: Sequence[float], steps: int) -> None:
    """Make Opacus's optimizer add correlated noise with these weights."""
    deviation = optimizer.noise_multiplier * optimizer.max_grad_norm
    correlated = CorrelatedNoise(weights, steps)

    def add_noise() -> None:
        for parameter in optimizer.params:
            total = parameter.summed_grad
            _check_processed_flag(total)
            noise = correlated.draw(total, deviation, parameter, optimizer.generator)
            parameter.grad = (total + noise).to(total.dtype).view_as(parameter)
            _mark_as_processed(total)

    optimizer.add_noise = add_noise


class OpacusTrainer(TrainerBase):
    """Base class of trainers that use Opacus. It has the arguments of `TrainerBase`.

    A subclass chooses one of Opacus's wrappers for the model, and one of Opacus's optimizers. With
    several ranks, the attributes ``clip`` and ``mode`` decide which optimizer class Opacus uses.

    Attributes:
        clip: how Opacus clips: ``flat`` or ``per_layer``.
        mode: Opacus's ``grad_sample_mode``; None for a trainer that supports only one rank.
    """

    labels = PRIVATE
    compiles = False
    noises: tuple[str, ...] = NOISES
    clip = "flat"
    mode: str | None = None
    optimizer_class: type[DPOptimizer] = DPOptimizer

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        check_layers(model)
        super().__init__(model, batch_size=batch_size, **options)
        if self.mode not in ("functorch", "ew"):
            refuse_strided_inputs(self.model)
        self.grad_sample_module = self.wrap()
        self.optimizer = self.private_optimizer()
        if self.optimizer.generator is None:  # so that Opacus would use PyTorch's default generator
            device = self.optimizer.params[0].device
            self.optimizer.generator = own_generator(device, self.seed, self.parallel)
        if len(self.noise_weights) > 1:
            correlate_noise(self.optimizer, self.noise_weights, self.noise_steps)
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
        """Return the optimizer class that Opacus has for several ranks.

        Raises:
            ConfigurationError: Opacus has no class for this trainer's ``clip`` and ``mode``. The
                error quotes Opacus's message.
        """
        try:
            found: type[DPOptimizer] = get_optimizer_class(self.clip, True, mode)
        except ValueError as error:
            raise self.refusal(f"Opacus raises {str(error)!r}; use grad_sample=hooks") from error
        return found

    @abstractmethod
    def wrap(self) -> nn.Module:
        """Return the model with Opacus's hooks."""

    def private_optimizer(self) -> DPOptimizer:
        """Return the optimizer that clips and adds noise."""
        return self.optimizer_class(
            self.plain_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=self.batch_size,
        )

    def private_loss(self, batch: Batch) -> Any:
        """Return a loss whose ``backward()`` sets the gradients that the optimizer clips."""
        return self.mean_loss(self.grad_sample_module, batch)

    def backward(self, loss: Any) -> None:
        """Run the backward of a loss from `private_loss`."""
        loss.backward()

    def train_step(self, batch: Batch) -> Tensor:
        with refusals(self.model):
            losses = [self.train_part(part, last) for last, part in self.parts(batch)]
            if not losses:
                self.train_empty_batch()
            return mean_of(losses, self.sizes)

    def train_part(self, part: Batch, last: bool) -> Tensor:
        """Clip the gradients of a micro-batch, and return its mean loss.

        After the last micro-batch of a batch, the optimizer adds noise and updates the parameters.
        """
        with phase("forward"):
            loss = self.private_loss(part)
            mean: Tensor = loss.detach()  # in fast gradient clipping, this returns the mean loss
        with phase("backward"):
            try:
                self.backward(loss)
            finally:  # explains errors, too
                check_rows(self.model, self.examples)
        with phase("optimizer"):
            if not last:  # Opacus's BatchMemoryManager does the same
                self.optimizer.signal_skip_step()
            self.optimizer.step()  # contains the phases that `mark_phases` marks
            self.optimizer.zero_grad(set_to_none=True)
        return mean

    def set_empty_gradient(self, parameter: Any) -> None:
        """Set a parameter's gradient as if a backward of an empty batch had run."""
        parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)

    def train_empty_batch(self) -> None:
        """Add noise to a gradient of zeros, and update the parameters."""
        with phase("optimizer"):
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    self.set_empty_gradient(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


CLIPPING = ("flat", "per_layer")
GRAD_SAMPLES = ("hooks", "functorch", "ew")


class DPSGDTrainer(OpacusTrainer):
    """DP-SGD that keeps the per-sample gradients of all parameters, and then clips them.

    Args:
        model: the workload's model.
        batch_size: number of examples in each batch.
        clip: ``flat`` clips the norm of an example's whole gradient to C. ``per_layer`` clips the
            gradient of each of the n parameters to the norm C/√n, so that the norm of the whole
            gradient is at most C. Both need the same noise.
        grad_sample: how per-sample gradients are computed. ``hooks`` uses a rule for each kind of
            layer; for layers without a rule, it applies ``vmap`` to ``grad``. ``functorch`` applies
            ``vmap`` to ``grad`` for every layer. ``ew`` uses PyTorch's expanded weights.
        options: further arguments of `TrainerBase`.
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

    def wrap(self) -> nn.Module:
        if self.grad_sample == "ew" and self.autocast:
            raise ConfigurationError(
                "expanded weights (grad_sample=ew) do not work under autocast: use "
                "grad_sample=hooks"
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


class DPFastGradientClippingTrainer(OpacusTrainer):
    """Fast gradient clipping, which keeps per-sample gradients of only one layer at a time.

    The constructor has the arguments of `TrainerBase`. The phase ``backward`` contains both
    backward passes and the computation of the clipping factors, because Opacus runs them in one
    call.
    """

    use_ghost_clipping: ClassVar[bool] = False
    module_class = GradSampleModuleFastGradientClipping
    optimizer_class = DPOptimizerFastGradientClipping
    mode = "ghost"

    def wrap(self) -> nn.Module:
        model: nn.Module = self.module_class(
            self.model,
            max_grad_norm=self.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )
        return model

    def set_empty_gradient(self, parameter: Any) -> None:
        parameter.grad = torch.zeros_like(parameter)

    def private_loss(self, batch: Batch) -> DPTensorFastGradientClipping:
        """Return a loss whose ``backward()`` runs both backward passes."""
        losses = self.example_losses(self.grad_sample_module, batch)
        return DPTensorFastGradientClipping(self.grad_sample_module, self.optimizer, losses)


class DPGhostClippingTrainer(DPFastGradientClippingTrainer):
    """Ghost clipping, which computes norms without per-sample gradients for some layers.

    These layers are linear layers and embeddings.
    """

    use_ghost_clipping = True

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel != "fsdp2":
            return super().distribute(model)
        self.module_class = GradSampleModuleFastGradientClippingFSDP
        self.optimizer_class = self.distributed_optimizer("ghost_fsdp")
        self.labels = {**self.labels, DRAWN_BY: "each rank, for all shards"}
        # Opacus shards a layer separately if it has a rule for the layer's per-sample gradients, or
        # if the layer has no trained parameters.
        mesh = mesh_of_all(next(model.parameters()).device.type)
        with patch.object(fsdp_utils, "fully_shard", partial(fully_shard, mesh=mesh)):
            wrapped: nn.Module = fsdp_utils.FSDP2Wrapper(model)
        self._check_rows(wrapped)
        return wrapped

    def _check_rows(self, model: nn.Module) -> None:
        """Raise if a trained parameter has fewer rows than there are ranks.

        Opacus cannot add noise to this parameter. The sum of the shard and the noise would be a
        replicated tensor, with which PyTorch cannot update the shard.
        """
        ranks = distributed.get_world_size()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (rows := len(parameter)) < ranks:
                raise self.refusal(
                    f"Opacus cannot add noise to {name}, which has only {rows} row"
                    f"{'s' * (rows > 1)} for {ranks} ranks; use fused, whose ranks draw noise for "
                    f"their own shards, or use fewer ranks"
                )
