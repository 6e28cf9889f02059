"""Captures the forward, backward and clip of a step as CUDA graphs, and replays the graphs."""

from __future__ import annotations

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import Buffer, Reduction
from dpbench.training.parallel import GRAPHS
from dpbench.training.phases import phase
from dpbench.training.step_operators import StepOperators, first_difference, place_of_user
from dpbench.workloads.base import examples_in

T = TypeVar("T")

Recorded = list[tuple[torch.cuda.CUDAGraph, list[Buffer]]]
"""Graphs of a phase, each with the buffers that are complete after the graph's replay."""

REDUCED_TOGETHER = 2**26
"""Under DDP, the phase clip is divided into graphs. A graph ends when it has completed buffers of
at least this many bytes. These buffers are then reduced while the next graph runs."""

is_capturing = torch.cuda.is_current_stream_capturing
"""PyTorch's function, also while `hidden_capture` replaces it in PyTorch."""

PLAIN = (bool, int, float, str, type(None))
"""Types of attributes by which Python may decide what a layer computes."""

BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They are kept, because PyTorch's allocator may refer to them."""


class StepGraphs:
    """The CUDA graphs of a trainer's forward, backward and clip.

    With micro-batches or Poisson sampling, the graphs are captured for one micro-batch and replayed
    for each micro-batch. The sums accumulate in buffers that begin as zeros, and are reduced after
    the last micro-batch. If a micro-batch of a Poisson batch has too few examples, copies of its
    first example fill the rest of the input. The losses of the copies are multiplied by 0.

    The captured operators must be those of an eager step. If Python reads numbers from the GPU in
    forward or backward, the capture gets the numbers that an eager step has read. Each replay
    compares these numbers with those that it computes, see `replay`.

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
        self._threshold = torch.full((), 0.0, dtype=torch.float64, device=device)
        self._eager: dict[str, StepOperators] = {}
        self._reads: list[str] = []  # where Python reads from the GPU
        self._last_read = ""  # the last phase in which it does
        self._replays = self._misfits = 0
        self._as_read = torch.ones((), dtype=torch.int32, device=device)
        self._on_host = torch.ones((), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sums: list[Buffer] = []
        self._reductions: list[Reduction] = []  # under FSDP2, where a graph contains them
        self._live: Any = None
        self._made: list[torch.cuda.CUDAGraph] = []
        self._peak = 0  # bytes that the step needs in addition
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self) -> None:
        """Run two steps without an update, so that kernels are compiled before the capture.

        The second step's operators are recorded, because a first step may fill caches. To know how
        much memory the steps need, this resets PyTorch's record of the peak.
        """
        trainer = self.trainer
        trainer.examples = trainer.part_size
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            before = torch.cuda.get_rng_state()
            states = torch.utils.checkpoint.get_device_states
            with (
                patch.object(torch.utils.checkpoint, "get_device_states", wraps=states) as saves,
                trainer.without_parameter_gradients(),
            ):
                if self._fills:  # only `mean_loss` checks how the model uses parameters
                    trainer.mean_loss(trainer.model, self.batch)
                self._forward()
                self._backward()
            drawn = not torch.equal(before, torch.cuda.get_rng_state())
            self._recomputes, self._draws_again = saves.called, saves.called and drawn
            with without_states(), trainer.without_parameter_gradients():
                for name, function in self._recorded().items():
                    with StepOperators() as self._eager[name]:
                        function()
            before_clip = torch.cuda.max_memory_allocated()
            for _ in self._sum_clipped():
                pass  # the graphs allocate their own buffers
            trainer.dropped.zero_()
        torch.cuda.current_stream().wait_stream(side)
        # Sums that accumulate are not in the graphs' pool.
        peak = before_clip if self._accumulates else torch.cuda.max_memory_allocated()
        self._peak = peak - allocated

    def _recorded(self) -> dict[str, Callable[[], None]]:
        return {"forward": self._forward, "backward": self._backward}

    def record(self) -> None:
        """Capture the graphs.

        Raises:
            RuntimeError: a graph cannot be captured, or would not be the eager step.
        """
        if self._draws_again:
            raise RuntimeError(
                "activation checkpointing must draw the same random numbers twice, which a graph "
                "cannot do"
            )
        for each in self._eager.values():
            if each.draws_on_cpu:
                raise RuntimeError(
                    f"{each.draws_on_cpu} draws random numbers on the CPU, and a graph would use "
                    f"the same numbers in each step"
                )
        if self._accumulates:
            self._sums = self.trainer.sums.begin_at_zero()
        # A model of Hugging Face that notices a capture computes its attention in another way.
        # So forward, and layers that backward computes again, do not notice it.
        with self.trainer.without_parameter_gradients(), without_states():
            for name, function in self._recorded().items():
                hides = name == "forward" or self._recomputes
                operators = StepOperators(self._eager[name].numbers)
                with hidden_capture() if hides else nullcontext():
                    graph, _ = self._capture(partial(self._watched, function, operators))
                if operators.places:
                    self._reads, self._last_read = self._reads + operators.places, name
                self.phases[name] = [(graph, [])]
                # FSDP2 gathers the last block earlier in a captured backward, see `_backward`.
                if name == "forward" or self.trainer.parallel != "fsdp2":
                    self._check_operators(name, operators)
        if self._reads and self._fills and self.trainer.parallel != "none":
            raise RuntimeError(
                f"Python reads from the GPU at {self._reads[0]}, and a rank without examples would "
                f"not compare what ranks read"
            )
        self.phases["clip"] = self._capture_clip()

    def _watched(self, function: Callable[[], None], operators: StepOperators) -> None:
        """Run a part of the step, and compare the numbers that an eager step has read."""
        self._reserve()
        with operators:
            function()
        for number, unread in zip(operators.numbers, operators.unread, strict=False):
            self._as_read.mul_(unread.reshape(()) == number)

    def _reserve(self) -> None:
        """Allocate as many bytes as the step needs at its peak, and free them.

        The graphs' pool is then one large piece of memory. Without this, a large tensor that fits
        into no free piece gets a piece of its own, and gaps remain that only graphs could use.
        """
        torch.empty(self._peak, dtype=torch.uint8, device=self.loss.device)
        self._peak = 0

    def _check_operators(self, name: str, captured: StepOperators) -> None:
        eager = self._eager.pop(name)
        if difference := first_difference(captured.calls, eager.calls):
            raise RuntimeError(f"the captured {name} would run other operators: {difference}")

    def replay(self, parts: Sequence[Batch]) -> Tensor | None:
        """Replay the graphs for each micro-batch of a step, and return the mean loss.

        Returns None, and leaves the parameters as they are, if the graphs contain a number that
        Python would read differently in this step on any rank. Python waits for the GPU to compare
        these numbers. The GPU compares them after the phase that has the last of them, so that
        Python need not wait for the phases behind it, and prepares the update meanwhile.
        """
        compared = None
        self._threshold.fill_(self.trainer.max_grad_norm)
        if self._sums:
            with phase("clip"):
                torch._foreach_zero_([buffer.flat for buffer in self._sums])
        if self._reads:
            self._as_read.fill_(1)
        losses = []
        for number, part in enumerate(parts, 1):
            self._fill(part)
            for name, graphs in self.phases.items():
                with phase(name):
                    for graph, complete in graphs:
                        graph.replay()
                        for buffer in complete:
                            self.trainer.reduce(buffer)
                if name == self._last_read and number == len(parts):
                    compared = self._begin_comparison()
            losses.append(self.loss.clone())
        for buffer in self._sums:
            self.trainer.reduce(buffer)
        self.trainer._reductions += self._reductions
        if compared:
            compared.synchronize()
            self._replays += 1
            if not self._on_host:
                self._misfits += 1
                return None
        if self._fills:
            total: Tensor = torch.stack(losses).sum() / sum(self.trainer.sizes)
            return total
        return mean_of(losses)

    @property
    def seldom_fit(self) -> bool:
        """True, with a warning, if most replays read other numbers than the captured step."""
        if 2 * self._misfits <= self._replays:
            return False
        warn_without_graphs(f"Python reads changing numbers from the GPU, at {self._reads[0]}")
        return True

    def _begin_comparison(self) -> torch.cuda.Event:
        """Begin to copy to the host whether all ranks read what an eager step has read."""
        if self.trainer.parallel != "none":
            distributed.all_reduce(self._as_read, distributed.ReduceOp.MIN)
        self._on_host.copy_(self._as_read, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

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
        self.trainer.captured_threshold = self._threshold
        self.trainer.present = self._present if self._fills else None
        try:
            return self._captured_clip()
        finally:
            self.trainer.captured_threshold = self.trainer.present = None

    def _captured_clip(self) -> Recorded:
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
        with no_collection():
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
    warn_without_graphs(why)
    return None


def warn_without_graphs(why: str) -> None:
    """Warn that the following steps run eagerly."""
    warnings.warn(f"fused runs without CUDA graphs, because {why}", stacklevel=5)


def reason(error: BaseException) -> str:
    """Return why a step cannot be captured, with the last line of the user's code, if any."""
    what = str(error).partition("\n")[0]
    if "synchronizing" in what:
        what = f"the model or its loss reads from the GPU ({what})"
    place = place_of_user(traceback.extract_tb(error.__traceback__))
    return f"{what}, at {place}" if place else what


def signature(trainer: Any, part: Batch) -> tuple[object, ...]:
    """Return what must be equal at capture and replay.

    These are the shapes and dtypes of the batch, the plain attributes of each layer, such as
    ``training`` or a dropout's ``p``, the addresses of buffers, and the function of the losses.
    """
    leaves, structure = pytree.tree_flatten(part)
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    losses = trainer.workload.captured_with()
    return structure, kinds, [decided_by(layer) for layer in trainer.layers], losses


def decided_by(layer: nn.Module) -> tuple[object, ...]:
    """Return a layer's attributes of plain types, and the addresses of its buffers."""
    plain = [(name, value) for name, value in vars(layer).items() if isinstance(value, PLAIN)]
    return *plain, *(each.data_ptr() for each in layer._buffers.values() if each is not None)


class Same:
    """Equal to another only if both hold the same object."""

    def __init__(self, value: object, version: int = 0) -> None:
        self.value, self._version = value, version  # an object that lives keeps its identity

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Same) and self.value is other.value
        return same and self._version == other._version  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def values_of(value: Any) -> object:
    """Return what must stay equal so that a function computes the same.

    These are its code, and the values that the code can reach: variables around it, defaults,
    globals, arguments of ``functools.partial``, and attributes of objects. Of globals and
    attributes, only those count whose names are in the code. Numbers and texts are compared, other
    objects must stay the same.
    """
    return _values_of(value, frozenset(), set())


def _values_of(value: Any, names: frozenset[str], known: set[int]) -> object:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):  # a graph reads a GPU's memory, but not that of the CPU
        return Same(value, 0 if value.is_cuda else value._version)
    if id(value) in known:
        return Same(value)
    known.add(id(value))
    if isinstance(value, (list, tuple)):
        return [_values_of(each, names, known) for each in value]
    if isinstance(value, dict):
        return [(key, _values_of(each, names, known)) for key, each in value.items()]
    if isinstance(value, partial):
        return _values_of((value.func, value.args, value.keywords), names, known)
    if isinstance(value, MethodType):
        function = _values_of(value.__func__, names, known)
        return function, _values_of(value.__self__, names | names_in(value.__func__), known)
    if isinstance(value, FunctionType):
        return _values_of_function(value, names | names_in(value), known)
    call = getattr(type(value), "__call__", None)  # noqa: B004  # its code is needed
    code = Same(getattr(call, "__code__", None))
    return Same(value), code, _attributes(value, names | names_in(call), known)


def _values_of_function(function: FunctionType, names: frozenset[str], known: set[int]) -> object:
    if function.__module__.partition(".")[0] == "torch":
        return Same(function)
    reached = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    reached += [function.__defaults__, function.__kwdefaults__]
    reached += [x for n, x in function.__globals__.items() if n in names]
    return Same(function.__code__), [_values_of(each, names, known) for each in reached]


def _attributes(value: Any, names: frozenset[str], known: set[int]) -> object:
    """Return the attributes of an object, of a module of Python only the plain ones."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        names |= {"training"}
    return [
        (name, _values_of(each, names, known))
        for name, each in own.items()
        if name in names and (isinstance(each, PLAIN) or not isinstance(value, ModuleType))
    ]


def codes_in(values: object) -> set[object]:
    """Return the codes of all functions in a result of `values_of`."""
    if isinstance(values, Same):
        return {values.value} if isinstance(values.value, CodeType) else set()
    parts = values if isinstance(values, (list, tuple)) else ()
    return set().union(*map(codes_in, parts))


def names_in(function: Any) -> frozenset[str]:
    """Return the names of globals and attributes in the code of a function and inner functions."""
    waiting, names = [getattr(function, "__code__", None)], set[str]()
    while waiting:
        if (code := waiting.pop()) is not None:
            names.update(code.co_names)
            waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names)


def next_buffers(buffers: Iterator[Buffer], least: float) -> list[Buffer]:
    """Take the next buffers until they have ``least`` bytes in total, or until the last buffer."""
    some: list[Buffer] = []
    for buffer in buffers:
        some.append(buffer)
        if sum(each.flat.nbytes for each in some) >= least:
            break
    return some


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and not in this context.

    The garbage may contain CUDA graphs. To destroy one during a capture ends the capture.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


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


def without_states() -> AbstractContextManager[object]:
    """Return a context in which activation checkpointing saves no states of random generators.

    To save them is forbidden during a capture. Models that need them are not captured.
    """
    return patch.object(torch.utils.checkpoint, "get_device_states", lambda *_: ([], []))


def hidden_capture() -> AbstractContextManager[object]:
    """Return a context in which PyTorch tells models that no stream is being captured."""
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
