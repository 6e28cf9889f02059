"""DP-SGD by its definition: a loop that clips and adds the gradient of one example after another.

The definition is from Abadi et al., "Deep Learning with Differential Privacy" (2016),
https://arxiv.org/abs/1607.00133. TensorFlow Privacy has this loop if its microbatches contain one
example each (McMahan et al., "A General Approach to Adding Differential Privacy to Iterative
Training Procedures", 2018, https://arxiv.org/abs/1812.06210). With the option ``vmap``,
``torch.func`` vectorizes the loop.
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
    """Computes the gradient of each example separately, without rules for kinds of layers.

    Without ``vmap``, each example has its own forward and backward.

    Args:
        model: the workload's model.
        batch_size: number of examples in each batch.
        vmap: whether to compute the gradients of all examples of a micro-batch in one vectorized
            pass, and to keep these gradients until they are clipped.
        options: further arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int, vmap: bool = False, **options: Any
    ) -> None:
        self.vmap, self.compiles = vmap, not vmap
        super().__init__(model, batch_size=batch_size, **options)
        # In bf16, a sum of many gradients would lose most of what later examples add.
        self.sums_in = torch.promote_types(self.trained[0].dtype, torch.float32)

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        clipped = self.clip_at_once if self.vmap else self.clip_each
        losses = [clipped(part) for _, part in self.parts(batch)]
        self.update()
        return mean_of(losses, self.sizes)

    def clip_each(self, part: Batch) -> Tensor:
        """Add one example's clipped gradient after another, and return the examples' mean loss."""
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
        """Clip the gradients that the backward of one example has set, and add them to the sums."""
        gradients = {p: p.grad for p in self.trained if p.grad is not None}
        self.plain_optimizer.zero_grad(set_to_none=True)
        factor = self.factors_for([squared_sample_norms(g[None]) for g in gradients.values()])
        for parameter, gradient in gradients.items():
            # PyTorch would round a factor without dimensions to the gradient's dtype.
            self.sums.add_scaled(parameter, gradient, factor.view([1] * gradient.dim()))

    def clip_at_once(self, part: Batch) -> Tensor:
        """Add the clipped gradients of a whole micro-batch at once, and return its mean loss."""
        # A parameter gets a name for each path to its module, and ``tie_weights`` is off. If
        # ``tie_weights`` were on, PyTorch would not restore the parameters of a module that occurs
        # twice.
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
        with phase("backward"), warnings.catch_warnings():  # one call runs forward and backward
            # vmap warns about operators that it runs in a loop.
            warnings.filterwarnings("ignore", "There is a performance drop")
            try:
                gradients, losses = made([p.detach() for p in self.trained], part)
            except RuntimeError as error:
                what = " ".join(str(error).split())
                if "vmap" in what or "torch.func" in what:
                    raise ConfigurationError(
                        f"torch.func cannot vectorize this model ({what}); use micro_batch without "
                        f"vmap"
                    ) from error
                raise
        with phase("clip"), torch.no_grad():
            factors = self.factors_for([squared_sample_norms(g) for g in gradients])
            for parameter in reversed(self.trained):
                samples = gradients.pop()
                weights = rounded_down(factors, samples.dtype)
                total = torch.mv(samples.reshape(len(samples), -1).t(), weights)
                self.sums.add(parameter, total.view_as(parameter))
        mean: Tensor = losses.mean()
        return mean
