"""What trainers share that sum clipped gradients themselves: the sums, the noise, the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, PRIVATE, TrainerBase
from dpbench.training.gradient_sums import Sums
from dpbench.training.known_model import KnownModel
from dpbench.training.norm_bounds import clipping_factors, total
from dpbench.training.parallel import begun_together, own_generator, own_part, summed
from dpbench.training.phases import phase
from dpbench.training.refusals import ONLY_GHOST, check_layers


class ClippedSumTrainer(TrainerBase):
    """Flat clipping without Opacus's optimizer; a subclass puts clipped gradients into `sums`.

    Arguments as `TrainerBase`.

    Raises:
        ConfigurationError: a layer or parameter cannot be clipped so; it is named.
    """

    labels = PRIVATE
    sums_in: torch.dtype | None = None
    """The type of the sums, if it is not that of the parameters."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        if self.autocast is torch.float16:
            raise ConfigurationError(
                "a GradScaler scales gradients before they are clipped: use bf16-amp"
            )
        check_layers(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        check_alike(self.trained)
        self.part_size = batch_size // self.micro_batches
        self.known = KnownModel(self.model)
        self._sums: Sums | None = None
        together = self.parallel != "none"
        self.generator = own_generator(self.trained[0].device) if together else None

    def spread(self, model: nn.Module) -> nn.Module:
        if self.parallel == "fsdp2":
            raise self.refusal(ONLY_GHOST)
        if self.parallel == "none":
            return model
        self.labels = {**self.labels, DRAWN_BY: "each rank, for its share"}
        return begun_together(model)

    @property
    def sums(self) -> Sums:
        """What the examples so far have added up to."""
        if self._sums is None:
            self._sums = Sums(self.trained, self.sums_in)
        return self._sums

    def take_sums(self) -> Sums:
        """The sums of a whole batch; the next step begins with new ones."""
        sums, self._sums = self.sums, None
        return sums

    def begin_step(self) -> None:
        """Refuse a model that was changed; begin anew, should a step before have failed."""
        self.known.check()
        self._sums = None

    def factors_for(self, squared_norms: Sequence[Tensor]) -> Tensor:
        """What gradients are multiplied by, of whose parts these are the squared norms ``[B]``."""
        return clipping_factors(total(squared_norms), self.max_grad_norm)

    def over_ranks(self, gradients: list[Tensor]) -> Iterable[Tensor]:
        """The buffers, once they have been added up over the ranks."""
        return gradients if self.parallel == "none" else summed(gradients)

    @torch.no_grad()
    def update(self) -> None:
        """Add noise to the summed gradients, and let the optimizer step with their mean."""
        sums = self.take_sums()
        gradients = sums.finish()
        with phase("noise"):
            # Not as a factor of `add_`, which a CPU rounds to the gradients' type: in bf16 noise
            # was up to 0.4 % too small.
            deviation = self.noise_multiplier * self.max_grad_norm
            for gradient in gradients:
                if deviation:
                    own = own_part(gradient, self.parallel)
                    own.add_(torch.empty_like(own).normal_(std=deviation, generator=self.generator))
                gradient.div_(self.joint_batch_size)
        with phase("optimizer"):
            gradients = [*self.over_ranks(gradients)]
            for parameter, place in sums.places.items():
                parameter.grad = place.to(parameter.dtype)
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)


def check_alike(parameters: list[nn.Parameter]) -> None:
    """Refuse parameters whose gradients cannot be in one buffer."""
    kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in parameters}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"this trainer has the gradients of trained parameters in common buffers, so these "
            f"must be of one type on one device, not {' and '.join(sorted(kinds))}"
        )
