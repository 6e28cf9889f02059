"""Captures the forward, backward and clip of a step as CUDA graphs, and replays the graphs."""

from __future__ import annotations

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import Buffer, Reduction
from dpbench.training.parallel import GRAPHS
from dpbench.training.phases import phase
from dpbench.workloads.base import examples_in

T = TypeVar("T")

Recorded = list[tuple[torch.cuda.CUDAGraph, list[Buffer]]]
"""Graphs of a phase, each with the buffers that are complete after the graph's replay."""

REDUCED_TOGETHER = 2**26
"""Under DDP, the phase clip is divided into graphs. A graph ends when it has completed buffers of
at least this many bytes. These buffers are then reduced while the next graph runs."""

is_capturing = torch.cuda.is_current_stream_capturing
"""PyTorch's function, also while `hidden_capture` replaces it in PyTorch."""

BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They are kept, because PyTorch's allocator may refer to them."""


class StepGraphs:
    """The CUDA graphs of a trainer's forward, backward and clip.

    With micro-batches or Poisson sampling, the graphs are captured for one micro-batch and replayed
    for each micro-batch. The sums accumulate in buffers that begin as zeros, and are reduced after
    the last micro-batch. If a micro-batch of a Poisson batch has too few examples, copies of its
    first example fill the rest of the input. The losses of the copies are multiplied by 0.

    Args:
        trainer: a `dpbench.training.fused.FusedTrainer`.
        part: a batch or a micro-batch, from which the graphs get the shapes and dtypes of their
            input.
    """

    def __init__(self, trainer: Any, part: Batch) -> None:
        self.trainer = trainer
        self.signature = signature(trainer, part)
        size, device = trainer.part_size, trainer.trained[0].device
        self.batch = pytree.tree_map(lambda each: each.new_empty(size, *each.shape[1:]), part)
        self.loss, self._present = torch.zeros((), device=device), torch.ones(size, device=device)
        self._fills = trainer.sampling == "poisson"
        self._fill(part)
        self.phases: dict[str, Recorded] = {}
        self._accumulates = trainer.micro_batches > 1 or self._fills
        self._sums: list[Buffer] = []
        self._reductions: list[Reduction] = []  # under FSDP2, where a graph contains them
        self._live: Any = None
        self._made: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self) -> None:
        """Run a step without an update, so that kernels are compiled before the capture."""
        self.trainer.examples = self.trainer.part_size
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.trainer.without_parameter_gradients():
            before = torch.cuda.get_rng_state()
            states = torch.utils.checkpoint.get_device_states
            with patch.object(torch.utils.checkpoint, "get_device_states", wraps=states) as saves:
                if self._fills:  # only `mean_loss` checks how the model uses parameters
                    self.trainer.mean_loss(self.trainer.model, self.batch)
                self._model_waits = waits_for_gpu(self._forward)
                self._backward()
            drawn = not torch.equal(before, torch.cuda.get_rng_state())
            self._recomputes, self._draws_again = saves.called, saves.called and drawn
        with torch.cuda.stream(side):
            for _ in self._sum_clipped():
                pass  # the graphs allocate their own buffers
        torch.cuda.current_stream().wait_stream(side)

    def record(self) -> None:
        """Capture the graphs."""
        if self._draws_again:
            raise RuntimeError(
                "activation checkpointing must draw the same random numbers twice, which a graph "
                "cannot do"
            )
        if self._accumulates:
            self._sums = self.trainer.sums.begin_at_zero()
        # Activation checkpointing saves the states of random number generators, which is forbidden
        # during a capture. The states are not needed here, because a model that draws random
        # numbers under checkpointing was refused above.
        unsaved: Any = patch.object(
            torch.utils.checkpoint, "get_device_states", lambda *_: ([], [])
        )
        # If a model of Hugging Face notices a capture, its attention makes a mask and runs other
        # kernels than without a capture. So the capture is hidden from the model, unless the model
        # makes Python wait for the GPU.
        with self.trainer.without_parameter_gradients(), unsaved:
            with nullcontext() if self._model_waits else hidden_capture():
                self.phases["forward"] = [(self._capture(self._forward)[0], [])]
            recomputed = self._recomputes and not self._model_waits
            with hidden_capture() if recomputed else nullcontext():
                self.phases["backward"] = [(self._capture(self._backward)[0], [])]
        self.phases["clip"] = self._capture_clip()

    def replay(self, parts: Sequence[Batch]) -> Tensor:
        """Replay the graphs for each micro-batch of a step, and return the mean loss."""
        if self._sums:
            with phase("clip"):
                torch._foreach_zero_([buffer.flat for buffer in self._sums])
        losses = []
        for part in parts:
            self._fill(part)
            for name, graphs in self.phases.items():
                with phase(name):
                    for graph, complete in graphs:
                        graph.replay()
                        for buffer in complete:
                            self.trainer.reduce(buffer)
            losses.append(self.loss.clone())
        for buffer in self._sums:
            self.trainer.reduce(buffer)
        self.trainer._reductions += self._reductions
        if self._fills:
            total: Tensor = torch.stack(losses).sum() / sum(self.trainer.sizes)
            return total
        return mean_of(losses)

    def _fill(self, part: Batch) -> None:
        """Copy a batch or micro-batch into the graphs' input."""
        examples = examples_in(part)

        def fill(target: Tensor, source: Tensor) -> None:
            target[:examples].copy_(source)
            target[examples:].copy_(source[:1].expand_as(target[examples:]))

        pytree.tree_map(fill, self.batch, part)
        if self._fills:
            self._present[:examples] = 1
            self._present[examples:] = 0

    def _capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture the operators of a function in a graph. Return the graph and the result."""
        graph = torch.cuda.CUDAGraph()
        GRAPHS.add(graph)
        self._made.append(graph)
        # In the mode "error", operators that wait for the GPU raise. Otherwise, CUDA would end the
        # capture with an error.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool),
            synchronization("error"),
        ):
            returned = function()
        return graph, returned

    def _forward(self) -> None:
        trainer = self.trainer
        if self._fills:
            losses = trainer.example_losses(trainer.model, self.batch)
            self._live = (losses * self._present).sum()
            self.loss.copy_(self._live.detach())
        else:
            loss = trainer.mean_loss(trainer.model, self.batch)
            self.loss.copy_(loss.detach())
            self._live = loss * trainer.part_size

    def _backward(self) -> None:
        if self.trainer.parallel == "fsdp2" and is_capturing():
            # FSDP2 prefetches on its own streams. A stream joins the capture only if it waits for a
            # captured stream. The call below makes FSDP2's streams wait for the current stream,
            # which is captured.
            self.trainer.last_block.unshard(async_op=True)
        self._live.backward()
        self._live = None

    def _sum_clipped(self) -> Iterator[Buffer]:
        yield from self.trainer.clipped(last=True)
        yield from self.trainer.take_sums().finish()

    def _clip_and_reduce_in_graph(self) -> list[Reduction]:
        """Clip, reduce all buffers and wait, so that one graph contains the reductions."""
        reductions: list[Reduction] = []
        self.trainer._reductions = reductions
        for buffer in self._sum_clipped():
            self.trainer.reduce(buffer)
        for each in reductions:
            each.wait()
        self.trainer._reductions = []
        return reductions

    def _capture_clip(self) -> Recorded:
        """Capture the phase clip.

        Under DDP, the phase has several graphs, unless sums accumulate over micro-batches. The
        buffers that one graph completes are reduced while the next graph runs.
        """
        if self._accumulates:
            all_of = partial(next_buffers, self.trainer.clipped(last=False), math.inf)
            graph, _ = self._capture(all_of)
            self.trainer.take_sums()
            return [(graph, [])]
        if self.trainer.parallel == "fsdp2":
            graph, self._reductions = self._capture(self._clip_and_reduce_in_graph)
            return [(graph, [])]
        buffers, left = self._sum_clipped(), len(self.trainer.sharing)
        least = REDUCED_TOGETHER if self.trainer.parallel == "ddp" else math.inf
        graphs = []
        while left:
            graphs.append(self._capture(partial(next_buffers, buffers, least)))
            left -= len(graphs[-1][1])
        return graphs

    def discard(self) -> None:
        """Free the memory of a failed capture, which PyTorch keeps if CUDA ended the capture."""
        self._live, self._sums, self.phases = None, [], {}
        ended = True
        for graph in self._made:
            try:
                graph.pool()
            except RuntimeError:
                ended = False
                BROKEN.append(graph)
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
            graph.reset()
        # The end of another capture takes PyTorch's generator out of the failed capture.
        if not ended:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
        gc.collect()
        torch.cuda.empty_cache()


def recorded_step(trainer: Any, part: Batch) -> StepGraphs | None:
    """Capture a trainer's step. If the capture fails, warn with the reason, and return None."""
    graphs = StepGraphs(trainer, part)
    graphs.warm_up()
    try:
        graphs.record()
    except RuntimeError as error:
        first: BaseException = error  # later errors of CUDA only say that an error occurred before
        while isinstance(first.__context__, RuntimeError):
            traceback.clear_frames(first.__traceback__)  # these frames hold tensors in memory
            first = first.__context__
        why = reason(first)
        traceback.clear_frames(first.__traceback__)
        del first
    else:
        return graphs
    graphs.discard()
    trainer.begin_step()
    warnings.warn(f"fused runs without CUDA graphs, because {why}", stacklevel=3)
    return None


def reason(error: BaseException) -> str:
    """Return why a step cannot be captured, with the last line of the user's code, if any."""
    what = str(error).partition("\n")[0]
    if "synchronizing" in what:
        what = f"the model or its loss reads from the GPU ({what})"
    own = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(own)]
    return f"{what}, at {of_user[-1].filename}:{of_user[-1].lineno}" if of_user else what


def signature(trainer: Any, part: Batch) -> tuple[object, ...]:
    """Return what must be equal at capture and replay: shapes, dtypes, threshold and modes."""
    leaves, structure = pytree.tree_flatten(part)
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    return structure, trainer.max_grad_norm, kinds, [layer.training for layer in trainer.layers]


def next_buffers(buffers: Iterator[Buffer], least: float) -> list[Buffer]:
    """Take the next buffers until they have ``least`` bytes in total, or until the last buffer."""
    some: list[Buffer] = []
    for buffer in buffers:
        some.append(buffer)
        if sum(each.flat.nbytes for each in some) >= least:
            break
    return some


@contextmanager
def synchronization(mode: str | int) -> Iterator[None]:
    """Warn or raise in this context when an operator waits for the GPU.

    Args:
        mode: ``warn`` or ``error``.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def waits_for_gpu(function: Callable[[], object]) -> bool:
    """Call a function. Return True if Python waited for the GPU during the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with synchronization("warn"):
            function()
    waits = False
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            waits = True
        elif "Synchronization debug mode is" not in str(each.message):  # "a prototype feature"
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return waits


def hidden_capture() -> AbstractContextManager[object]:
    """Return a context in which PyTorch tells models that no stream is being captured."""
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
