"""Base class of trainers that clip, add noise and update without Opacus's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, PRIVATE, TrainerBase
from dpbench.training.correlated_noise import NOISES, CorrelatedNoise
from dpbench.training.gradient_sums import Buffer, Sums, in_buffers
from dpbench.training.model_snapshot import ModelSnapshot
from dpbench.training.norms import clipping_factors, total
from dpbench.training.parallel import broadcast_parameters, own_generator, own_part, rank_and_ranks
from dpbench.training.phases import phase
from dpbench.training.reductions import Reduction, as_gradient
from dpbench.training.refusals import ONLY_GHOST, check_layers


class ClippedSumTrainer(TrainerBase):
    """Adds noise to sums of clipped gradients, and updates the parameters.

    A subclass clips each example's gradient, and adds the clipped gradients to `sums`.

    The constructor has the arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    labels = PRIVATE
    compiles = False
    noises: tuple[str, ...] = NOISES
    sums_in: torch.dtype | None = None
    """Dtype of the sums; None for the dtype of the parameters."""
    draws_in_update = False
    """Whether the trainer adds noise after reductions even under DDP. If False, under DDP each rank
    adds noise to a part of each sum before the sum is reduced."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        if self.autocast is torch.float16:
            raise ConfigurationError(
                "with fp16-amp, a GradScaler would scale gradients before they are clipped: use "
                "bf16-amp"
            )
        check_layers(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        check_alike(self.trained)
        self.sharing = in_buffers(self.trained)
        self.snapshot = ModelSnapshot(self.model)
        self.correlated = CorrelatedNoise(self.noise_weights)
        self._sums: Sums | None = None
        self._reductions: list[Reduction] = []
        together = self.parallel != "none"
        self.generator = own_generator(self.trained[0].device) if together else None

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel == "fsdp2":
            raise self.refusal(ONLY_GHOST)
        if self.parallel == "none":
            return model
        self.labels = {**self.labels, DRAWN_BY: "each rank, for its share"}
        return broadcast_parameters(model)

    @property
    def sums(self) -> Sums:
        """Sums of clipped gradients over the examples of this batch so far."""
        if self._sums is None:
            ranks = rank_and_ranks()[1] if self.parallel == "fsdp2" else 1
            self._sums = Sums(self.sharing, self.sums_in, ranks)
        return self._sums

    def take_sums(self) -> Sums:
        """Return the sums of a batch. The next step begins with new sums."""
        sums, self._sums = self.sums, None
        return sums

    def begin_step(self) -> None:
        """Raise if the model has changed, and discard the sums of a failed step."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward without a backward leaves the root module gathered
        self.snapshot.check()
        self._sums, self._reductions = None, []

    def factors_for(self, squared_norms: Sequence[Tensor]) -> Tensor:
        """Return clipping factors ``[B]``.

        Args:
            squared_norms: for each part of the gradient, such as a layer's part, the squared norms
                of all examples, ``[B]``.
        """
        return clipping_factors(total(squared_norms), self.max_grad_norm)

    def reduce(self, buffer: Buffer) -> None:
        """Begin to reduce a complete buffer over the ranks.

        Under DDP, each rank first adds noise to its part of the buffer, unless `draws_in_update` is
        True.
        """
        if self.parallel == "ddp" and not self.draws_in_update:
            with phase("noise"):
                self.make_private(buffer.flat, buffer.number)
        self._reductions.append(Reduction(buffer, self.parallel))
        if self.parallel == "fsdp2" and len(self._reductions) > AT_ONCE:
            self._reductions[-1 - AT_ONCE].wait()  # frees the buffer that was sent

    def all_reductions(self) -> list[Reduction]:
        """Begin to reduce the remaining buffers, and return the reductions of all buffers."""
        for buffer in self.take_sums().finish():
            self.reduce(buffer)
        reductions, self._reductions = self._reductions, []
        return reductions

    def make_private(self, gradient: Tensor, number: int) -> None:
        """Add noise to a sum of clipped gradients, and divide the sum by the batch size.

        Under DDP, this rank adds noise only to its part of the sum.

        Args:
            gradient: the sum, changed in place.
            number: index of the sum's buffer, which is the same in each step.
        """
        # The deviation is not passed to `add_` as ``alpha``, because a CPU rounds ``alpha`` to the
        # gradients' dtype. In bf16 the noise could be up to 0.4 % too small.
        if deviation := self.noise_multiplier * self.max_grad_norm:
            own = own_part(gradient) if self.parallel == "ddp" else gradient
            if len(self.noise_weights) > 1:
                own.add_(self.correlated.draw(own, deviation, number, self.generator))
            else:
                own.add_(torch.empty_like(own).normal_(std=deviation, generator=self.generator))
        gradient.div_(self.joint_batch_size)

    def update(self) -> None:
        """Turn the sums into noisy means, and let the optimizer step with these means."""
        self.noisy_step(self.all_reductions())

    @torch.no_grad()
    def noisy_step(self, reductions: Sequence[Reduction]) -> None:
        """Turn reduced sums into noisy means, and let the optimizer step with these means."""
        if self.parallel != "ddp":
            with phase("noise"):
                for each in reductions:
                    self.make_private(each.wait(), each.number)
        self.step_optimizer(reductions)

    def step_optimizer(self, reductions: Sequence[Reduction]) -> None:
        """Let the optimizer step with the noisy mean gradients."""
        with phase("optimizer"):
            for each in reductions:
                for parameter, part in zip(each.parameters, each.parts(each.wait()), strict=True):
                    parameter.grad = as_gradient(part, parameter)
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)


AT_ONCE = 4
"""Number of reductions that may be unfinished at the same time under FSDP2. When `reduce` begins
another reduction, it waits for the oldest, because the buffer that a reduction sends stays in
memory until then."""


def check_alike(parameters: list[nn.Parameter]) -> None:
    """Raise if parameters differ in dtype or device, so that gradients cannot share a buffer."""
    kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in parameters}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"the gradients of trained parameters share buffers in this trainer, so the parameters "
            f"must be of one type on one device, not {' and '.join(sorted(kinds))}"
        )
