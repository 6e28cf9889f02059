"""Opacus's flat clipping, without needless memory traffic.

Opacus's hooks compute the per-sample gradients (Opacus 1.6.0,
https://github.com/meta-pytorch/opacus). The folder ``docs/upstream`` has diffs that change Opacus
in most of the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from torch import Tensor, distributed, nn

from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import ClippedSumTrainer
from dpbench.training.ghost_norms import GhostNorms
from dpbench.training.gradient_sums import in_buffers, one_buffer, rounded_down
from dpbench.training.norm_bounds import clipping_factors, total
from dpbench.training.parallel import own_part
from dpbench.training.phases import phase
from dpbench.training.refusals import refusals


class ClippedMeanTrainer(ClippedSumTrainer):
    """Base class of trainers that compute means of clipped gradients instead of sums.

    The clipping factors are divided by the number of examples in the batches of all ranks, so
    weighted sums of gradients are means. A subclass passes each parameter's contributions to `add`.
    Independent noise is drawn at once for all parameters, or, under DDP, for all parameters that
    are reduced together. Correlated noise is drawn at once for parameters that share a buffer.
    Noise is added in place.
    """

    def begin_step(self) -> None:
        super().begin_step()
        self._means: dict[Tensor, Tensor] = {}
        self._works: list[distributed.Work] = []

    def add(self, parameter: Tensor, mean: Tensor) -> None:
        """Add a micro-batch's contribution to the mean clipped gradient of a parameter."""
        if parameter in self._means:
            self._means[parameter] += mean
        else:
            self._means[parameter] = mean

    def take_means(self, parameters: Sequence[Tensor]) -> None:
        """Set the gradients of parameters to the mean clipped gradients plus noise.

        With several ranks, this rank adds noise only to its part of each gradient.
        """
        for parameter in parameters:
            mean = self._means.pop(parameter, None)  # None if the batch is empty
            parameter.grad = torch.zeros_like(parameter) if mean is None else mean
        deviation = self.noise_multiplier * self.max_grad_norm / self.joint_batch_size
        if not deviation:
            return
        gradients = [own_part(parameter.grad, self.parallel) for parameter in parameters]
        if len(self.noise_weights) == 1:
            flat, noise, _ = one_buffer(gradients)
            flat.normal_(std=deviation, generator=self.generator)
            torch._foreach_add_(gradients, [*noise.values()])
            return
        for number, sharing in enumerate(in_buffers(gradients)):
            if len(sharing) == 1:
                self.kept_noise.add_to(sharing[0], deviation, number)
            else:
                flat, noise, _ = one_buffer(sharing)
                self.kept_noise.add_to(flat.zero_(), deviation, number)
                torch._foreach_add_(sharing, [*noise.values()])

    def reduce_means(self, parameters: Sequence[Tensor]) -> None:
        """Add noise to the means of some parameters, and begin to reduce the means together."""
        with phase("noise"):
            self.take_means(parameters)
        self._works.append(distributed.all_reduce(joined_gradient(parameters), async_op=True))

    @torch.no_grad()
    def update(self) -> None:
        if self.parallel != "ddp":
            with phase("noise"):
                self.take_means(self.trained)
        with phase("optimizer"):
            for sharing in in_buffers([p for p in self.trained if p in self._means]):
                self.reduce_means(sharing)
            for work in self._works:
                work.wait()
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)


class LeanTrainer(ClippedMeanTrainer):
    """`DPSGDTrainer` with hooks and flat clipping, and with these changes.

    - If a parameter is used once, its per-sample gradient is not copied. Opacus copies the gradient
      into a tensor of zeros.
    - The loss is a sum. Opacus uses the mean loss, and rescales each layer's output gradient.
    - For layers that Opacus's grad samplers support, no ordinary gradients are computed. Opacus
      computes ordinary gradients, and replaces them without reading them.
    - A parameter's per-sample gradients are freed when their sum is computed. The clipping factors
      are divided by the number of examples in the batches of all ranks, so that the sum is a mean.
    - On one rank, independent noise is drawn for all parameters at once. Noise is added in place.
      With several ranks, each rank draws the noise for a part of each gradient. With Opacus, rank 0
      draws all noise.
    - Under DDP, the gradients of small parameters are reduced together, and reductions overlap with
      the sums of other parameters. Opacus reduces the gradient of one parameter after another.

    The constructor has the arguments of `TrainerBase`.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.grad_sample_module = KeepingModule(self.model, loss_reduction="sum")
        leave_out_ordinary_gradients(self.grad_sample_module)

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        losses = []
        with refusals(self.model):
            for last, part in self.parts(batch):
                with phase("forward"):
                    loss = self.mean_loss(self.grad_sample_module, part)
                with phase("backward"):
                    (loss * self.examples).backward()
                losses.append(loss.detach())
                with phase("clip"):
                    self.clip(last)
        self.update()
        return mean_of(losses, self.sizes)

    @torch.no_grad()
    def clip(self, last: bool) -> None:
        """Clip, sum and free per-sample gradients.

        Under DDP, add noise to the sums after the last micro-batch, and begin to reduce the sums.
        """
        trained: list[Any] = self.trained
        norms = GhostNorms()
        for parameter in trained:
            if getattr(parameter, "grad_sample", None) is None:
                raise AttributeError("Per sample gradient is not initialized")
            norms.add_samples(parameter.grad_sample, parameter.dtype, by_product=True)
        squares = total(norms.squared_norms())
        factors = clipping_factors(squares, self.max_grad_norm, self.joint_batch_size)
        rounded = rounded_down(factors, trained[0].dtype)
        for sharing in in_buffers(trained):
            for parameter in sharing:
                self.add(parameter, sum_up(parameter, rounded))
            if last and self.parallel == "ddp":
                self.reduce_means(sharing)


def sum_up(parameter: Any, factors: Tensor) -> Tensor:
    """Remove the per-sample gradients of a parameter, and return their weighted sum."""
    samples = parameter.grad_sample.to(parameter.dtype)
    parameter.grad_sample = parameter.grad = None
    return torch.einsum("i,i...", factors, samples)


class KeepingModule(GradSampleModule):  # type: ignore[misc]
    """Opacus's hooks, which store per-sample gradients with `keep`, without a copy if possible."""

    def capture_backprops_hook(
        self,
        module: Any,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Compute per-sample gradients as Opacus's method does, but store them with `keep`."""
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        sampler = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
        for parameter, samples in sampler(module, activations, backprops).items():
            keep(parameter, samples, module.max_batch_len)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter._forward_counter -= 1
                if parameter._forward_counter == 0:
                    promote_current_grad_sample(parameter)
        if not module.activations and hasattr(module, "max_batch_len"):
            del module.max_batch_len


def keep(parameter: Any, samples: Tensor, max_batch_len: int) -> None:
    """Store a per-sample gradient on its parameter, without Opacus's copy into zeros if possible.

    The copy is needed in two cases. If the batch is shorter than ``max_batch_len``, the copy fills
    the missing examples with zeros. If a parameter is used several times, gradients are added to
    the stored tensor. Without the copy, this tensor could be the layer's output gradient, which
    must not change.
    """
    used_once = parameter.requires_grad and parameter._forward_counter == 1
    used_once = used_once and not hasattr(parameter, "_current_grad_sample")
    if used_once and len(samples) == max_batch_len:
        parameter._current_grad_sample = samples
    else:
        create_or_accumulate_grad_sample(
            param=parameter, grad_sample=samples, max_batch_len=max_batch_len
        )


def leave_out_ordinary_gradients(module: Any) -> None:
    """Stop autograd from computing parameter gradients of layers with grad samplers of Opacus."""
    for layer in module.iterate_submodules(module._module):
        # For other layers, functorch differentiates copies of the parameters.
        if type(layer) in module.GRAD_SAMPLERS:
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            layer.register_forward_pre_hook(partial(_become_constants, own))
            layer.register_forward_hook(partial(_become_parameters, own), prepend=True)


def _become_constants(own: list[nn.Parameter], *_: object) -> None:
    for parameter in own:
        parameter.requires_grad_(False)


def _become_parameters(
    own: list[nn.Parameter], _layer: nn.Module, _inputs: object, returned: Any
) -> None:
    for parameter in own:
        parameter.requires_grad_()
    if torch.is_grad_enabled() and isinstance(returned, Tensor) and not returned.requires_grad:
        returned.requires_grad_()  # otherwise, backward would end before the hook of this layer


def joined_gradient(parameters: Sequence[Any]) -> Tensor:
    """Return one tensor that contains the gradients of all ``parameters``.

    If there are several parameters, their gradients become views of this tensor.
    """
    only, *others = parameters
    if not others:
        gradient: Tensor = only.grad
        return gradient
    buffer, places, _ = one_buffer(parameters)
    torch._foreach_copy_([*places.values()], [parameter.grad for parameter in parameters])
    for parameter in parameters:
        parameter.grad = places[parameter]
    return buffer
