"""DP-SGD with flat clipping that moves few more bytes than a step without privacy.

The method is book-keeping (`dpbench.training.book_keeping`) with merged passes. If norms are
cheapest from products of tokens × tokens, a GPU uses one kernel for all large layers of equal
shape, and does not store these products. With SGD, Adam and AdamW, the update itself draws the
noise. On a GPU, forward, backward and clip run as CUDA graphs where possible, and do not wait for
Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dpbench.training.base import DRAWN_BY, Batch
from dpbench.training.book_keeping import BookKeepingTrainer
from dpbench.training.ghost_norms import squared_norms_of_alike
from dpbench.training.gradient_sums import in_buffers
from dpbench.training.graphs import StepGraphs, recorded_step, signature
from dpbench.training.kernels import scaled
from dpbench.training.layer_norm_kernel import layer_norm_samples
from dpbench.training.model_snapshot import ModelSnapshot
from dpbench.training.noisy_updates import Numbers, noisy_mean, noisy_update
from dpbench.training.norm_ways import PRODUCTS
from dpbench.training.parallel import rank_and_ranks
from dpbench.training.per_layer import (
    Gradients,
    KeptOfLayer,
    PairRule,
    Rule,
    SampledRule,
    rule_of,
    three_dimensional,
)
from dpbench.training.phases import phase
from dpbench.training.reductions import Reduction
from dpbench.training.updates import MergedUpdate, Update, groups_of, why_not


class LayerNormRule(SampledRule):
    """Computes the per-sample gradients of a layer norm by one operator, `layer_norm_samples`."""

    layer: nn.LayerNorm

    def __init__(self, layer: nn.Module, name: str) -> None:
        Rule.__init__(self, layer, name)  # the rule needs no sampler of Opacus

    def gradients(self, x: Tensor, g: Tensor) -> Gradients:
        samples = layer_norm_samples(three_dimensional(x), three_dimensional(g), self.layer.eps)
        made = zip((self.layer.weight, self.layer.bias), samples, strict=True)
        return {p: each for p, each in made if p is not None and p.requires_grad}


class FusedTrainer(BookKeepingTrainer):
    """`BookKeepingTrainer` with merged passes, and with CUDA graphs on a GPU.

    With SGD, Adam and AdamW, the parameters and moving averages become views of flat buffers. The
    update draws and adds the noise, so there is no phase ``noise``. A separate pass adds the noise
    before the optimizer's own step for other optimizers, for options that
    `dpbench.training.updates.why_not` names, and under FSDP2 for all optimizers except plain SGD.

    Under DDP, all ranks draw the same noise from the same seeds. So no noise is sent, and every
    rank knows the noise. Under FSDP2, each rank draws the noise for its shards, which stay outside
    flat buffers.

    Graphs are captured in the first step whose batch is not empty. If dpbench counts the operators
    of this step or of an earlier step, no graphs are captured. A later step runs eagerly if its
    examples have different shapes or dtypes, if its operators are counted, or if the clipping
    threshold or a layer's training mode has changed. If the model cannot be captured, a warning
    says why, and all steps run eagerly. Under FSDP2, the graphs contain FSDP2's collectives, see
    `dpbench.training.parallel.leave_group`. Micro-batches under FSDP2 always run eagerly.
    """

    scaled = staticmethod(scaled)
    draws_in_update = True
    has_kernel = True
    in_graphs = True
    noises = ("independent", "banded")  # `blt` would need buffers in memory

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.sharing = in_buffers(self.trained, groups_of(self.plain_optimizer))
        why = why_not(self.plain_optimizer)
        if self.parallel == "fsdp2" and not is_plain(self.plain_optimizer):
            why = "the optimizer's state is sharded"
        self.merged = not why
        self._update: MergedUpdate | None = None
        if self.merged:
            self.labels = {**self.labels, "noise": "in the update"}
            if self.parallel != "fsdp2":
                self._update = MergedUpdate(self.sharing)
        self._warned: set[str] = set()
        self.snapshot = ModelSnapshot(self.model, in_place=True)
        self._seed_buffers()
        self._graphs: StepGraphs | None = None
        self._is_first = True
        self.layers = [*self.model.modules()]
        self.last_block: Any = None  # the last FSDP2 block that forward ran
        for layer in self.layers[1:]:
            if isinstance(layer, FSDPModule):
                layer.register_forward_hook(self._note_block)

    def _note_block(self, block: nn.Module, *_: object) -> None:
        self.last_block = block

    def _seed_buffers(self) -> None:
        """Give each buffer a seed. Under FSDP2, the seeds differ between ranks."""
        number, (rank, ranks) = len(self.sharing), rank_and_ranks()
        seeds = (torch.randint(2**62, ()) + torch.arange(number)).to(self.trained[0].device)
        if self.parallel != "none":
            distributed.broadcast(seeds, 0)
        if self.parallel == "ddp":
            self.labels = {**self.labels, DRAWN_BY: "every rank, all from one seed"}
        self.seeds, self._seeds_of_a_step = seeds, number
        self._steps, bands = 0, len(self.noise_weights)
        # Row i contains the weights for step i. The last row is also used in all later steps. Steps
        # before the first step get the weight 0.
        weights = seeds.new_tensor(self.noise_weights, dtype=torch.float32) / self.noise_weights[0]
        self._weights = weights.expand(bands, bands).tril()
        self._ages = number * torch.arange(bands, device=seeds.device)
        if self.parallel == "fsdp2":
            self.seeds, self._seeds_of_a_step = seeds + rank * number, ranks * number

    def rule_of(self, layer: nn.Module, name: str) -> Rule[Any]:
        usual = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1
        return LayerNormRule(layer, name) if usual else rule_of(layer, name)

    def squared_norms(self, seen: dict[nn.Module, KeptOfLayer]) -> list[Tensor]:
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
        rest = {n: calls for n, calls in seen.items() if self.ways[self.rules[n].name] != PRODUCTS}
        for layer, rule in self.rules.items():
            if layer in seen and layer not in rest and isinstance(rule, PairRule):
                x, g = rule.joined(seen[layer])
                kind = (rule.trains_bias, x.shape[1:], x.dtype, g.shape[1:], g.dtype)
                alike.setdefault(kind, []).append((x, g))
        norms = super().squared_norms(rest)
        for (trains_bias, *_), pairs in alike.items():
            xs, gs = zip(*pairs, strict=True)
            norms += squared_norms_of_alike(list(xs), list(gs), bool(trains_bias)).unbind()
        return norms

    def train_step(self, batch: Batch) -> Tensor:
        # Operators inside a graph cannot be counted. Under FSDP2, only the last micro-batch reduces
        # gradients, but every replay of a graph would run the collectives that the graph contains.
        graphs = self.trained[0].is_cuda and _get_current_dispatch_mode() is None
        graphs = graphs and not (self.parallel == "fsdp2" and self.micro_batches > 1)
        if not graphs:
            self._is_first = self.replays = False
            return super().train_step(batch)
        self.begin_step()
        parts = [part for _, part in self.parts(batch)]  # raises if the batch size is wrong
        if parts and self._is_first:
            self._is_first = False
            self._graphs = recorded_step(self, parts[0])
        fits = parts and self._graphs and signature(self, parts[0]) == self._graphs.signature
        self.replays = bool(fits)
        if not (fits and self._graphs):
            return super().train_step(batch)
        loss = self._graphs.replay(parts)
        reductions, self._reductions = self._reductions, []
        self._add_noise_and_update(reductions)
        return loss

    def update(self) -> None:
        self._add_noise_and_update(self.all_reductions())

    @torch.no_grad()
    def _add_noise_and_update(self, reductions: Sequence[Reduction]) -> None:
        """Add noise and update the parameters, in one merged pass if possible."""
        deviation = self.noise_multiplier * self.max_grad_norm * self.noise_weights[0]
        self.seeds += self._seeds_of_a_step  # new seeds, which only correlated noise uses again
        seeds, weights = self.seeds.unbind(), None
        if len(self.noise_weights) > 1:
            seeds = (self.seeds[:, None] - self._ages).unbind()
            weights = self._weights[min(self._steps, len(self._weights) - 1)]
        self._steps += 1
        updates: list[Update] | str = ""
        if self._update:
            with phase("optimizer"):
                updates = self._update.updates(
                    self.plain_optimizer, deviation, self.joint_batch_size
                )
        if self.parallel == "fsdp2" and is_plain(self.plain_optimizer):
            with phase("optimizer"):
                for each in reductions:
                    self._update_shards(each, seeds[each.number], deviation)
        elif isinstance(updates, str):
            if updates and updates not in self._warned:
                self._warned.add(updates)
                warnings.warn(
                    f"fused adds the noise in a pass before the update, because {updates}",
                    stacklevel=4,
                )
            with phase("noise"):
                for each in reductions:
                    noisy_mean(
                        each.wait(),
                        seeds[each.number],
                        deviation,
                        1 / self.joint_batch_size,
                        weights,
                    )
            self.step_optimizer(reductions)
        else:
            with phase("optimizer"):
                for each in reductions:
                    updates[each.number](each.wait(), seeds[each.number], weights)

    def _update_shards(self, reduction: Reduction, seed: Tensor, deviation: float) -> None:
        """Update this rank's shards by plain SGD with noise."""
        rate = self.plain_optimizer.param_groups[0]["lr"]
        numbers = Numbers(deviation, 1 / self.joint_batch_size, rate)
        gradient = reduction.wait()
        shards = [parameter.to_local() for parameter in reduction.parameters]
        if len(shards) > 1:  # shards of small parameters, which are not contiguous in memory
            change = torch.zeros_like(gradient)
            noisy_update(change, [], gradient, seed, "plain", numbers)
            torch._foreach_add_(shards, reduction.parts(change))
        elif length := shards[0].numel():
            noisy_update(shards[0].view(-1), [], gradient[:length], seed, "plain", numbers)


@cache
def plain_options() -> dict[str, object]:
    """Return the default options of SGD, without the learning rate."""
    usual = torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults
    return {name: value for name, value in usual.items() if name != "lr"}


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for SGD with default options, one parameter group, and an unchanged step."""
    first, *others = optimizer.param_groups
    plain = all(first.get(name) == value for name, value in plain_options().items())
    return type(optimizer) is torch.optim.SGD and plain and not others and not why_not(optimizer)
