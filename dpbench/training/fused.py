"""DP-SGD with flat clipping that moves little more than a standard step does.

Book-keeping (`dpbench.training.book_keeping`) whose passes are merged: norms of all layers of a
shape come from one kernel, which keeps neither per-sample gradients nor products T × T; noise is
drawn where the update adds it; on a GPU forward, backward and clip are CUDA graphs, so that they do
not wait for Python.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, Batch
from dpbench.training.book_keeping import BookKeepingTrainer
from dpbench.training.ghost_norms import squared_norms_of_alike
from dpbench.training.gradient_sums import Buffer, in_buffers, one_buffer
from dpbench.training.kernels import layer_norm_samples, noisy_descent, scaled
from dpbench.training.known_model import ModelSnapshot
from dpbench.training.norm_bounds import squared_sample_norms
from dpbench.training.parallel import GRAPHS, rank_and_ranks
from dpbench.training.per_layer import (
    EmbeddingRule,
    Gradients,
    LinearRule,
    Rule,
    SampledRule,
    Seen,
    rule_of,
    three_dimensional,
)
from dpbench.training.phases import phase
from dpbench.training.reductions import Reduction

T = TypeVar("T")

Graphs = dict[str, list[tuple[torch.cuda.CUDAGraph, list[Buffer]]]]
"""The graphs of each phase, each with the buffers that are complete after it."""

REDUCED_TOGETHER = 2**26
"""Buffers are reduced once they have this many bytes, while the next graph runs."""


class LayerNormRule(SampledRule):
    """The small gradients of each example, from one pass over the layer's inputs."""

    layer: nn.LayerNorm

    def __init__(self, layer: nn.Module, name: str) -> None:
        Rule.__init__(self, layer, name)  # it needs no sampler

    def gradients(self, x: Tensor, g: Tensor) -> Gradients:
        samples = layer_norm_samples(three_dimensional(x), three_dimensional(g), self.layer.eps)
        made = zip((self.layer.weight, self.layer.bias), samples, strict=True)
        return {p: each for p, each in made if p is not None and p.requires_grad}


class FusedTrainer(BookKeepingTrainer):
    """`BookKeepingTrainer` with merged passes, and on a GPU in CUDA graphs.

    With plain SGD the parameters become parts of buffers, and the update draws the noise as it
    adds it: there is no phase ``noise``. Other optimizers update as `BookKeepingTrainer` does.
    Under DDP all ranks draw the same noise: nothing is sent, and every rank knows it. Under FSDP2
    each rank draws it for its shards, which keep their memory.

    Only the first step captures graphs. These run eagerly: batches of other shapes, micro-batches,
    steps whose operators are counted, and models in which a layer has switched to `eval` or back.
    Under FSDP2 the graphs hold its collectives: see `dpbench.training.parallel.leave_group`.
    """

    scaled = staticmethod(scaled)
    in_graphs = True

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.merged = is_plain(self.plain_optimizer)
        if self.merged:
            self.labels = {**self.labels, "noise": "in the update"}
            if self.parallel != "fsdp2":
                self.flats = [flatten_parameters(sharing) for sharing in in_buffers(self.trained)]
            self.known = ModelSnapshot(self.model, in_place=True)
        self.draws_in_update = self.merged
        self._seed_buffers()
        device = self.trained[0].device
        self._graphs: Graphs | None = None  # before the first step
        self._recorded_reductions: list[Reduction] = []
        self._loss = torch.zeros((), device=device)
        self._layers = [*self.model.modules()]
        self._last_block: Any = None  # of those that FSDP2 gathers, in forward
        for layer in self._layers[1:]:
            if isinstance(layer, FSDPModule):
                layer.register_forward_hook(self._note_block)

    def _note_block(self, block: nn.Module, *_: object) -> None:
        self._last_block = block

    def _seed_buffers(self) -> None:
        """Give each buffer a seed; under FSDP2 seeds differ between ranks."""
        number, (rank, ranks) = len(in_buffers(self.trained)), rank_and_ranks()
        seeds = (torch.randint(2**62, ()) + torch.arange(number)).to(self.trained[0].device)
        if self.parallel != "none":
            distributed.broadcast(seeds, 0)
        if self.parallel == "ddp" and self.merged:
            self.labels = {**self.labels, DRAWN_BY: "every rank, all from one seed"}
        self.seeds, self._seeds_of_a_step = seeds, number
        if self.parallel == "fsdp2":
            self.seeds, self._seeds_of_a_step = seeds + rank * number, ranks * number

    def rule_of(self, layer: nn.Module, name: str) -> Rule[Any]:
        usual = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1
        return LayerNormRule(layer, name) if usual else rule_of(layer, name)

    def squared_norms(self, seen: dict[nn.Module, Seen]) -> list[Tensor]:
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
        rest: dict[nn.Module, Seen] = {}
        small: list[Tensor] = []
        for layer in (layer for layer in self.rules if layer in seen):
            rule = self.rules[layer]
            if isinstance(rule, LinearRule | EmbeddingRule) and rule.layer.weight.requires_grad:
                x, g = rule.joined(seen[layer])
                kind = (rule.trains_bias, x.shape[1:], x.dtype, g.shape[1:], g.dtype)
                alike.setdefault(kind, []).append((x, g))
            elif isinstance(rule, LayerNormRule):
                small += seen[layer][0].values()
            else:
                rest[layer] = seen[layer]
        norms = super().squared_norms(rest)
        if small:
            norms.append(squared_sample_norms(torch.cat(small, 1), self.trained[0].dtype))
        for (trains_bias, *_), pairs in alike.items():
            xs, gs = zip(*pairs, strict=True)
            norms += squared_norms_of_alike(list(xs), list(gs), bool(trains_bias)).unbind()
        return norms

    def update(self) -> None:
        if not self.merged:
            super().update()
            return
        with phase("optimizer"):
            self._descend(self.all_reductions())

    @torch.no_grad()
    def _descend(self, reductions: Iterable[Reduction]) -> None:
        """Noise and update in one pass over gradients and parameters."""
        rate = self.plain_optimizer.param_groups[0]["lr"] / self.joint_batch_size
        deviation = self.noise_multiplier * self.max_grad_norm
        self.seeds += self._seeds_of_a_step  # seeds are never reused
        seeds = self.seeds.unbind()
        for each in reductions:
            gradient, seed = each.wait(), seeds[each.number]
            if self.parallel != "fsdp2":
                noisy_descent(self.flats[each.number], gradient, seed, deviation, rate)
                continue
            shards = [parameter.to_local() for parameter in each.parameters]
            if len(shards) > 1:  # small ones, whose shards are not contiguous
                change = torch.zeros_like(gradient)
                noisy_descent(change, gradient, seed, deviation, rate)
                torch._foreach_add_(shards, each.parts(change))
            elif length := shards[0].numel():
                noisy_descent(shards[0].view(-1), gradient[:length], seed, deviation, rate)

    # --- graphs ------------------------------------------------------------------------------

    def train_step(self, batch: Batch) -> Tensor:
        graphs = self.merged and self.micro_batches == 1 and self.trained[0].is_cuda
        # Operators inside a graph cannot be counted.
        graphs = graphs and _get_current_dispatch_mode() is None
        if self._graphs is None:
            self.begin_step()
            next(self.parts(batch))  # refuses another size
            self._graphs = self._recorded(batch) if graphs else {}
        if not (graphs and self._graphs and self._signature(batch) == self._recorded_signature):
            return super().train_step(batch)
        self.begin_step()
        pytree.tree_map(lambda mine, given: mine.copy_(given), self._batch, batch)
        for name, graphs_of_phase in self._graphs.items():
            with phase(name):
                for graph, complete in graphs_of_phase:
                    graph.replay()
                    for buffer in complete:
                        self.reduce(buffer)
        with phase("optimizer"):
            self._descend(self._recorded_reductions or self._reductions)
        return self._loss.clone()

    def _signature(self, batch: Batch) -> tuple[object, ...]:
        """What a captured graph depends on."""
        leaves, structure = pytree.tree_flatten(batch)
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        return structure, self.max_grad_norm, kinds, [layer.training for layer in self._layers]

    def _recorded(self, batch: Batch) -> Graphs:
        """The graphs of a step by phase, captured after one warm-up without update."""
        self._batch = pytree.tree_map(torch.clone, batch)
        self._recorded_signature = self._signature(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.without_parameter_gradients():
            waits = waits_for_the_gpu(self._forward)
            self._backward()
        with torch.cuda.stream(side):
            for _ in self._sum_clipped():
                pass  # the graphs have buffers of their own
        torch.cuda.current_stream().wait_stream(side)
        graphs: Graphs = {}
        pool = torch.cuda.graph_pool_handle()
        try:
            with self.without_parameter_gradients():
                # Hugging Face's attention makes a mask, and runs other kernels, if a stream is
                # being captured. Only a model that reads from the GPU has to know of the capture.
                with nullcontext() if waits else unnoticed_capture():
                    graphs["forward"] = [(recorded(self._forward, pool)[0], [])]
                graphs["backward"] = [(recorded(self._backward, pool)[0], [])]
            graphs["clip"] = self._recorded_clip(pool)
        except RuntimeError as error:
            what = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"a step cannot become a CUDA graph, because the model or its loss asks the GPU "
                f"for something ({what}); use the trainer book_keeping"
            ) from error
        return graphs

    def _forward(self) -> None:
        self._live = self.mean_loss(self.model, self._batch)
        self._loss.copy_(self._live.detach())

    def _backward(self) -> None:
        if self.parallel == "fsdp2" and torch.cuda.is_current_stream_capturing():
            # FSDP2's own streams, which gather ahead, join the capture only by waiting for a
            # captured stream. So they wait for this one first.
            self._last_block.unshard(async_op=True)
        (self._live * self.batch_size).backward()
        del self._live

    def _sum_clipped(self) -> Iterator[Buffer]:
        yield from self.clipped(last=True)
        yield from self.take_sums().close()

    def _clip_and_reduce_in_graph(self) -> list[Reduction]:
        """Clip and reduce; buffers that were sent make room for other sums."""
        self._reductions = []
        for buffer in self._sum_clipped():
            self.reduce(buffer)
        for each in self._reductions:
            each.wait()
        return self._reductions

    def _recorded_clip(self, pool: Any) -> list[tuple[torch.cuda.CUDAGraph, list[Buffer]]]:
        """Clip as several graphs under DDP, each with the buffers to reduce after it."""
        if self.parallel == "fsdp2":
            graph, self._recorded_reductions = recorded(self._clip_and_reduce_in_graph, pool)
            return [(graph, [])]
        buffers, left = self._sum_clipped(), len(in_buffers(self.trained))
        least = REDUCED_TOGETHER if self.parallel == "ddp" else math.inf
        graphs = []
        while left:
            graphs.append(recorded(partial(taken, buffers, least), pool))
            left -= len(graphs[-1][1])
        return graphs


def flatten_parameters(parameters: list[Tensor]) -> Tensor:
    """One buffer of which the parameters become parts."""
    flat, places, _ = one_buffer(parameters)
    for parameter, place in places.items():
        place.copy_(parameter.data)
        parameter.data = place
    return flat


def recorded(part: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a part of a step in a pool's memory; returns the graph and the part's result."""
    graph = torch.cuda.CUDAGraph()
    GRAPHS.add(graph)
    with torch.cuda.graph(graph, pool=pool):
        returned = part()
    return graph, returned


def taken(buffers: Iterator[Buffer], least: float) -> list[Buffer]:
    """The next buffers with this many bytes in total, or the last ones."""
    some: list[Buffer] = []
    for buffer in buffers:
        some.append(buffer)
        if sum(each.flat.nbytes for each in some) >= least:
            break
    return some


def waits_for_the_gpu(part: Callable[[], object]) -> bool:
    """Run a part of a step; returns whether Python read something from the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            part()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = False
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            waits = True
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return waits


def unnoticed_capture() -> AbstractContextManager[object]:
    """A context in which models are told that no stream is being captured."""
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is plain SGD: it only subtracts the gradient times the rate."""
    usual = torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults
    same = {name: value for name, value in usual.items() if name != "lr"}
    return (
        type(optimizer) is torch.optim.SGD
        and len(optimizer.param_groups) == 1
        and all(optimizer.param_groups[0][name] == value for name, value in same.items())
    )
