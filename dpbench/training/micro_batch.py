"""DP-SGD by its definition: a loop that clips and adds the gradient of each example.

Abadi et al., "Deep Learning with Differential Privacy" (2016), https://arxiv.org/abs/1607.00133,
define it so. TensorFlow Privacy first implemented it as microbatches of one example (McMahan et
al., "A General Approach to Adding Differential Privacy to Iterative Training Procedures", 2018,
https://arxiv.org/abs/1812.06210). With ``vmap``, ``torch.func`` vectorizes the loop.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import ClippedSumTrainer
from dpbench.training.gradient_sums import rounded_down
from dpbench.training.norm_bounds import squared_sample_norms
from dpbench.training.phases import phase
from dpbench.workloads.base import parts_of


class MicroBatchTrainer(ClippedSumTrainer):
    """A forward and a backward pass for each example, so layers of all kinds are clipped correctly.

    Args:
        vmap: compute the gradients of all examples of a (micro-)batch in one vectorized pass, and
            keep them until they are clipped.
        options: as `TrainerBase`.

    Raises:
        ConfigurationError: names a layer or parameter that this trainer cannot clip.
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int, vmap: bool = False, **options: Any
    ) -> None:
        self.vmap, self.compiles = vmap, not vmap
        super().__init__(model, batch_size=batch_size, **options)
        # In bf16, sums would hardly change after the first hundred examples.
        self.sums_in = torch.promote_types(self.trained[0].dtype, torch.float32)

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        clipped = self.clip_at_once if self.vmap else self.clip_each
        losses = [clipped(part) for _, part in self.parts(batch)]
        self.update()
        return mean_of(losses, self.sizes)

    def clip_each(self, part: Batch) -> Tensor:
        """Add the clipped gradient of one example after another; return the mean loss."""
        losses = []
        for example in parts_of(part, [1] * self.examples):
            with phase("forward"):
                loss = self.mean_loss(self.model, example)
            with phase("backward"):
                loss.backward()
            with phase("clip"):
                self.add_clipped()
            losses.append(loss.detach())
        return mean_of(losses)

    @torch.no_grad()
    def add_clipped(self) -> None:
        """Clip and add the gradients that backward left for one example."""
        gradients = {p: p.grad for p in self.trained if p.grad is not None}
        self.plain_optimizer.zero_grad(set_to_none=True)
        factor = self.factors_for([squared_sample_norms(g[None]) for g in gradients.values()])
        for parameter, gradient in gradients.items():
            # PyTorch would round a zero-dimensional factor to the gradient's dtype.
            self.sums.put_scaled(parameter, gradient, factor.view([1] * gradient.dim()))

    def clip_at_once(self, part: Batch) -> Tensor:
        """Add the clipped gradients of all examples, made at once; return the mean loss."""
        # Name parameters per module and do not tie weights: PyTorch's tying would not restore a
        # module that occurs twice.
        number = {parameter: n for n, parameter in enumerate(self.trained)}
        attributes = {
            ".".join(filter(None, (path, name))): number[parameter]
            for path, module in self.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }

        def loss_of(trained: list[Tensor], example: Batch) -> tuple[Tensor, Tensor]:
            def model(*given: Any, **options: Any) -> Any:
                values = {name: trained[n] for name, n in attributes.items()}
                return functional_call(self.model, values, given, options, tie_weights=False)

            loss = self.mean_loss(model, pytree.tree_map(lambda each: each[None], example))
            return loss, loss.detach()

        made = torch.func.vmap(
            torch.func.grad(loss_of, has_aux=True), in_dims=(None, 0), randomness="different"
        )
        with phase("backward"), warnings.catch_warnings():  # contains forward: one call runs both
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap loops
            try:
                gradients, losses = made([p.detach() for p in self.trained], part)
            except RuntimeError as error:
                what = " ".join(str(error).split())
                if "vmap" in what or "torch.func" in what:
                    raise ConfigurationError(
                        f"torch.func cannot vectorize this model ({what}); use micro_batch alone"
                    ) from error
                raise
        with phase("clip"), torch.no_grad():
            factors = self.factors_for([squared_sample_norms(g) for g in gradients])
            for parameter in reversed(self.trained):
                samples = gradients.pop()
                weights = rounded_down(factors, samples.dtype)
                total = torch.mv(samples.reshape(len(samples), -1).t(), weights)
                self.sums.put(parameter, total.view_as(parameter))
        mean: Tensor = losses.mean()
        return mean
