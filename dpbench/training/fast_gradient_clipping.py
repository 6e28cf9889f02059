"""DP-SGD with two backward passes, as Opacus implements it, with or without ghost clipping.

The first backward pass computes the norm of each example's gradient. The second pass computes the
gradient of the weighted sum of losses, whose weights are the clipping factors. So per-sample
gradients need not be kept (Lee and Kifer, https://arxiv.org/abs/2009.03106). Ghost clipping
computes the norms of linear layers and embeddings without per-sample gradients (Li et al.,
https://arxiv.org/abs/2110.05679).
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils import fsdp_utils
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dpbench.training.base import DRAWN_BY, Batch
from dpbench.training.dpsgd import OpacusTrainer
from dpbench.training.parallel import mesh_of_all


def sharded_as_opacus_does(model: nn.Module) -> nn.Module:
    """Shard the model with FSDP2, by Opacus's ``FSDP2Wrapper``.

    Opacus shards a layer separately if it has a rule for the layer's per-sample gradients, or if
    the layer has no trained parameters.
    """
    mesh = mesh_of_all(next(model.parameters()).device.type)
    with patch.object(fsdp_utils, "fully_shard", partial(fully_shard, mesh=mesh)):
        wrapped: nn.Module = fsdp_utils.FSDP2Wrapper(model)
    return wrapped


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
    loss_reduction = "mean"

    def wrap(self) -> nn.Module:
        model: nn.Module = self.module_class(
            self.model,
            loss_reduction=self.loss_reduction,
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
        return self.shard(model)

    def private_optimizer(self) -> DPOptimizer:
        if self.parallel == "fsdp2":
            self._check_rows()
        return super().private_optimizer()

    def _check_rows(self) -> None:
        """Raise if a trained parameter has fewer rows than there are ranks.

        Opacus cannot add noise to this parameter. The sum of the shard and the noise would be a
        replicated tensor, with which PyTorch cannot update the shard.
        """
        of_opacus = self.distributed_optimizer("ghost_fsdp").add_noise
        if self.optimizer_class.add_noise is not of_opacus:
            return
        ranks = distributed.get_world_size()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and (rows := len(parameter)) < ranks:
                raise self.refusal(
                    f"Opacus cannot add noise to {name}, which has only {rows} row"
                    f"{'s' * (rows > 1)} for {ranks} ranks; use fused, whose ranks draw noise for "
                    f"their own shards, or use fewer ranks"
                )

    def shard(self, model: nn.Module) -> nn.Module:
        """Return the model, sharded with FSDP2."""
        return sharded_as_opacus_does(model)
