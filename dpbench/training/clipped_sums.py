"""Sums of clipped gradients, and the base class of trainers that sum, add noise and update.

The sums of several parameters are views of one buffer, which is reduced over ranks in one piece,
while other kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, PRIVATE, TrainerBase
from dpbench.training.correlated_noise import NOISES, CorrelatedNoise
from dpbench.training.kernels import put_product, weighted_sum
from dpbench.training.norms import GhostNorms, clipping_factors, place_of, total
from dpbench.training.parallel import broadcast_parameters, own_generator, own_share, rank_and_ranks
from dpbench.training.phases import phase
from dpbench.training.refusals import ONLY_GHOST, ModelSnapshot, check_unmixed_layers

ALIGNED = 128
"""Each part of a buffer begins at a multiple of this many elements, for fast matrix products."""


class Buffer(NamedTuple):
    """Memory that several parameters share.

    Attributes:
        flat: the whole memory, one-dimensional.
        places: for each parameter a view of ``flat``, in the shape of the parameter.
        number: index that identifies the buffer.
    """

    flat: Tensor
    places: dict[Tensor, Tensor]
    number: int = 0


def one_buffer(
    parameters: Sequence[Tensor], dtype: torch.dtype | None = None, ranks: int = 1, number: int = 0
) -> Buffer:
    """Allocate a buffer for these parameters, without initial values.

    Args:
        parameters: the parameters.
        dtype: dtype of the buffer; None for the dtype of the parameters.
        ranks: number of ranks. The rows of each parameter are padded to a multiple of this number.
        number: index that identifies the buffer.
    """
    sizes = [-(-ranks * shard_size(p, ranks) // ALIGNED) * ALIGNED for p in parameters]
    first = parameters[0]
    flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    pieces = zip(parameters, flat.split(sizes), strict=True)
    return Buffer(flat, {p: piece[: p.numel()].view(p.shape) for p, piece in pieces}, number)


def shard_size(parameter: Tensor, ranks: int) -> int:
    """Return the number of elements in the largest shard of a parameter under FSDP2."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


LARGE = 2**18
"""A parameter with at least this many elements has its own buffer."""


def groups_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """Return for each parameter the index of its group in the optimizer."""
    groups = enumerate(optimizer.param_groups)
    return {parameter: number for number, group in groups for parameter in group["params"]}


def in_buffers(
    parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> list[list[Tensor]]:
    """Divide parameters among buffers. Small parameters of equal group and dtype share a buffer."""
    groups = groups_of(optimizer)
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for each in parameters:
        if each.numel() < LARGE:
            small.setdefault((groups.get(each, -1), each.dtype), []).append(each)
    return [[p] for p in parameters if p.numel() >= LARGE] + [*small.values()]


class Sums:
    """Sums of clipped gradients, one for each parameter, as views of buffers.

    The sums are in float32, or in float64 for parameters in float64. If sums were rounded to bf16,
    one example could change a sum of many similar gradients by several times the clipping
    threshold.

    A buffer is allocated on first use. By then, some activations may have been freed. Buffers are
    finished in the order of their numbers, so that all ranks reduce them in the same order.

    Args:
        sharing: the parameters of each buffer, from `in_buffers`.
        ranks: number of ranks over which FSDP2 will distribute the sums.
    """

    def __init__(self, sharing: Sequence[Sequence[Tensor]], ranks: int = 1) -> None:
        self._ranks = ranks
        self._sharing = dict(enumerate(sharing))
        self._number = {p: n for n, sharing in self._sharing.items() for p in sharing}
        self._made: dict[int, Buffer] = {}
        self._filled: set[Tensor] = set()
        self._closed: set[Tensor] = set()
        self._left = {number: len(sharing) for number, sharing in self._sharing.items()}
        self._next = 0

    def begin_at_zero(self) -> list[Buffer]:
        """Allocate all buffers and fill them with zeros.

        Without this call, a parameter's first gradient is copied into the buffer.
        """
        for parameter in self._number:
            self._place(parameter).zero_()
            self._filled.add(parameter)
        return [*self._made.values()]

    def add(self, parameter: Tensor, total: Tensor) -> None:
        """Add ``total`` to the sum of a parameter."""
        place = self._place(parameter)
        if self._is_first(parameter):
            place.copy_(total)
        else:
            place.add_(total)

    def add_multiplied(self, parameter: Tensor, gradient: Tensor, factor: Tensor) -> None:
        """Add ``gradient × factor`` to the sum of a parameter. The factor has one element."""
        place = self._place(parameter)
        if self._is_first(parameter):
            torch.mul(gradient, factor, out=place)
        else:
            place.addcmul_(gradient, factor)

    def add_many(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Add to the sums of many small parameters, with few kernel launches."""
        places = [self._place(parameter) for parameter in totals]
        is_first = [self._is_first(parameter) for parameter in totals]
        pieces = [*totals.values()]
        for combine, first in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
            chosen = [n for n, each in enumerate(is_first) if each is first]
            if chosen:
                combine([places[n] for n in chosen], [pieces[n] for n in chosen])

    def add_written(self, parameter: Tensor, write: Callable[[Tensor], object]) -> None:
        """Add to the sum of a parameter the numbers that ``write`` writes into a flat tensor.

        For a parameter's first gradient, ``write`` writes directly into the buffer.
        """
        place = self._place(parameter).view(-1)
        if self._is_first(parameter):
            write(place)
        else:
            total = torch.empty_like(place)
            write(total)
            place.add_(total)

    def add_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the sum of a parameter. The product is computed in the buffer."""
        put_product(self._place(parameter), a, b, adds=not self._is_first(parameter))

    def add_rows(self, parameter: Tensor, rows: Tensor, totals: Tensor) -> None:
        """Add to rows of the sum of a parameter.

        Args:
            parameter: the parameter.
            rows: row indices, ``[n]``, in which an index may be repeated.
            totals: for each row index, the numbers that are added to this row, ``[n, columns]``.
        """
        place = self._place(parameter)
        if self._is_first(parameter):
            place.zero_()
        place.index_add_(0, rows, totals.to(place.dtype))

    def _place(self, parameter: Tensor) -> Tensor:
        number = self._number[parameter]
        if number not in self._made:
            sharing = self._sharing[number]
            wide = torch.promote_types(sharing[0].dtype, torch.float32)
            self._made[number] = one_buffer(sharing, wide, self._ranks, number)
        return self._made[number].places[parameter]

    def _is_first(self, parameter: Tensor) -> bool:
        first = parameter not in self._filled
        self._filled.add(parameter)
        return first

    def finish(self, parameters: Iterable[Tensor] | None = None) -> Iterator[Buffer]:
        """Finish the sums of some parameters, and yield each buffer whose sums are all finished.

        A buffer is yielded only after all buffers with smaller numbers.

        Args:
            parameters: the parameters; None for all parameters. If nothing was added to a
                parameter's sum, the sum is set to zero.
        """
        for parameter in self._number if parameters is None else parameters:
            if parameter in self._closed:
                continue
            if self._is_first(parameter):
                self._place(parameter).zero_()
            self._closed.add(parameter)
            self._left[self._number[parameter]] -= 1
            while self._left.get(self._next) == 0:
                self._next += 1
                yield self._made.pop(self._next - 1)


class Factors:
    """The clipping factors of a batch, and tensors that were multiplied by them.

    Args:
        exact: the factors ``[B]``, float32 or wider.
        times: `dpbench.training.kernels.multiplied`, or `.multiplied_by_kernel`.
    """

    def __init__(self, exact: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.exact, self._times = exact, times
        self._last: tuple[Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor by the factors. Reuse the last result if the tensor is the same."""
        if self._last is None or place_of(self._last[0]) != place_of(tensor):
            self._last = None  # frees the memory before more is allocated
            self._last = tensor, self._times(tensor, self.exact)
        return self._last[1]


ROW = 128
"""Small gradients are concatenated, and then divided into rows of this many numbers. Each row has
its own norm."""


class KeptGradients:
    """Per-sample gradients of several layers.

    Small gradients are concatenated, so that few kernels are launched.

    Args:
        samples: the per-sample gradients ``[B, …]``, by parameter. The constructor empties this
            dictionary.
    """

    def __init__(self, samples: dict[Tensor, Tensor]) -> None:
        small = {p: g for p, g in samples.items() if p.numel() < LARGE}
        self._large = {p: g for p, g in samples.items() if p not in small}
        samples.clear()
        self._joined: list[tuple[list[Tensor], Tensor]] = []
        for dtype in dict.fromkeys(each.dtype for each in small.values()):
            alike = [p for p, each in small.items() if each.dtype == dtype]
            pieces = [(each := small.pop(p)).reshape(len(each), p.numel()) for p in alike]
            rest = -sum(piece.shape[1] for piece in pieces) % ROW
            pieces.append(pieces[0].new_zeros(len(pieces[0]), rest))
            self._joined.append((alike, torch.cat(pieces, 1)))

    def squared_norms(self) -> list[Tensor]:
        """Return for each piece of the gradient the squared norms of all examples, ``[B]``."""
        norms = GhostNorms()
        for parameters, samples in self._joined:
            # Some kinds of layers compute in float32 for parameters in 16 bits, too.
            narrowest = min((p.dtype for p in parameters), key=lambda dtype: dtype.itemsize)
            norms.add_samples(samples.unflatten(1, (-1, ROW)), narrowest)
        for parameter, samples in self._large.items():
            norms.add_samples(samples, parameter.dtype)
        return norms.squared_norms()

    def add_small(self, factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of all small parameters to ``sums``."""
        while self._joined:
            parameters, samples = self._joined.pop()
            wide = torch.promote_types(parameters[0].dtype, torch.float32)
            total = samples.new_empty(samples.shape[1], dtype=wide)
            weighted_sum(samples, factors, total)
            sizes = [parameter.numel() for parameter in parameters]
            pieces = total[: sum(sizes)].split(sizes)
            totals = zip(parameters, pieces, strict=True)
            sums.add_many({parameter: piece.view(parameter.shape) for parameter, piece in totals})

    def add_large(self, parameters: Collection[Tensor], factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of the large parameters among ``parameters`` to ``sums``.

        The per-sample gradients of these parameters are freed.
        """
        for parameter in parameters:
            if parameter in self._large:
                samples = self._large.pop(parameter).flatten(1)
                sums.add_written(parameter, partial(weighted_sum, samples, factors))


# PyTorch 2.13 deprecates the old name.
reduce_scatter: Any = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


class Reduction:
    """An asynchronous sum of a buffer over the ranks, which begins when the object is created.

    Under DDP, the sum replaces the buffer's contents on each rank. Under FSDP2, each rank gets only
    the rows of its shards in a new tensor. Before they are sent, rows must be ordered by rank. If
    only one parameter has the buffer, its rows already have this order. If several parameters share
    the buffer, their rows are first copied into this order.

    Args:
        buffer: a buffer that `one_buffer` has made for this number
            of ranks.
        parallel: see `dpbench.core.case.PARALLELS`. With ``none``, nothing is sent.
    """

    def __init__(self, buffer: Buffer, parallel: str) -> None:
        self.number = buffer.number
        self.parameters: list[Any] = [*buffer.places]
        self._flat, self._places = buffer.flat, [*buffer.places.values()]
        self._sharded = parallel == "fsdp2"
        self._work: Any = None
        self._sent: Tensor | None = None  # must stay in memory while it is sent
        if parallel == "ddp":
            self._work = distributed.all_reduce(self._flat, async_op=True)
        elif self._sharded:
            self._scatter()

    def _scatter(self) -> None:
        group = self.parameters[0].device_mesh.get_group()
        ranks = group.size()
        self._sizes = [shard_size(p, ranks) for p in self.parameters]
        begins = [place.storage_offset() for place in self._places]
        rows = [
            self._flat[begin : begin + ranks * size].view(ranks, size)
            for begin, size in zip(begins, self._sizes, strict=True)
        ]
        self._sent = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).flatten()
        self._flat = self._sent.new_empty(sum(self._sizes))
        self._work = reduce_scatter(self._flat, self._sent, group=group, async_op=True)
        self._places = []

    def wait(self) -> Tensor:
        """Return this rank's share of the sum. On a GPU, kernels wait, but Python does not."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Divide ``flat``, which has the shape of the sum, into a view for each parameter or shard.

        Without FSDP2, ``flat`` must be the sum itself.
        """
        if not self._sharded:
            return self._places
        pieces = zip(self.parameters, flat.split(self._sizes), strict=True)
        shards = [(parameter.to_local().shape, piece) for parameter, piece in pieces]
        return [piece[: shape.numel()].view(shape) for shape, piece in shards]


def as_gradient(piece: Tensor, parameter: Any) -> Tensor:
    """Convert a parameter's piece of a sum into a gradient that the optimizer accepts."""
    piece = piece.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return piece
    gradient: Tensor = DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return gradient


class ClippedSumTrainer(TrainerBase):
    """Adds noise to sums of clipped gradients, and updates the parameters.

    A subclass clips each example's gradient, and adds the clipped gradients to `sums`. An example
    whose norm is infinite or NaN is dropped: it adds exactly zero, and the noise stays the same.

    Attributes:
        dropped: how many examples of this rank the last step dropped, an int64 scalar on the device
            of the parameters. To read it, Python waits for the step. No noise is added to it.

    The constructor has the arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    labels = PRIVATE
    compiles = False
    noises: tuple[str, ...] = NOISES
    draws_in_update = False
    """Whether the trainer adds noise after reductions even under DDP. If False, under DDP each rank
    adds noise to its share of each sum before the sum is reduced."""
    captured_threshold: Tensor | None = None
    """C as an input of the CUDA graph that is being captured, a float64 scalar; otherwise None."""
    loss_scale: float = 1
    """The number by which a loss was divided before backward, such as B for a mean loss."""
    present: Tensor | None = None
    """In a CUDA graph with room for more examples, 1 for examples of the batch and 0 for copies."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        check_unmixed_layers(self.model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        check_together(self.trained)
        self.sharing = in_buffers(self.trained, self.plain_optimizer)
        self.snapshot = ModelSnapshot(self.model)
        self.correlated = CorrelatedNoise(self.noise_weights, self.noise_steps)
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.trained[0].device)
        self._sums: Sums | None = None
        self._reductions: list[Reduction] = []
        self.generator = own_generator(self.trained[0].device, self.seed, self.parallel)

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
            self._sums = Sums(self.sharing, ranks)
        return self._sums

    def take_sums(self) -> Sums:
        """Return the sums of a batch. The next step begins with new sums."""
        sums, self._sums = self.sums, None
        return sums

    def begin_step(self) -> None:
        """Raise if the model has changed, and discard the sums of a failed step."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward without a backward leaves the root module gathered
        self.snapshot.check(self.plain_optimizer)
        self._sums, self._reductions = None, []
        self.dropped.zero_()

    def factors_for(self, squared_norms: Sequence[Tensor]) -> Tensor:
        """Return clipping factors ``[B]``, and count the factors that are 0.

        Args:
            squared_norms: for each piece of the gradient, such as a layer's, the squared norms of
                all examples, ``[B]``.
        """
        threshold = self.captured_threshold
        factors = clipping_factors(
            total(squared_norms) * self.loss_scale**2,
            self.max_grad_norm if threshold is None else threshold,
        )
        factors *= self.loss_scale
        dropped = factors == 0
        self.dropped += (dropped if self.present is None else dropped * self.present).sum().long()
        return factors

    def reduce(self, buffer: Buffer) -> None:
        """Begin to reduce a complete buffer over the ranks.

        Under DDP, each rank first adds noise to its share of the buffer, unless `draws_in_update`.
        """
        if self.parallel == "ddp" and not self.draws_in_update:
            with phase("noise"):
                self.make_private(buffer.flat, buffer.number)
        self._reductions.append(Reduction(buffer, self.parallel))
        if self.parallel == "fsdp2" and len(self._reductions) > AT_ONCE:
            self._reductions[-1 - AT_ONCE].wait()  # frees the buffer that was sent

    def reduce_all(self, buffers: Iterable[Buffer]) -> None:
        """Call `reduce` for each buffer. Afterwards, no local variable keeps a buffer in memory."""
        for buffer in buffers:
            self.reduce(buffer)

    def make_private(self, gradient: Tensor, number: int) -> None:
        """Add noise to a sum of clipped gradients, and divide the sum by the batch size.

        Under DDP, this rank adds noise only to its share of the sum.

        Args:
            gradient: the sum, changed in place.
            number: index of the sum's buffer, which is the same in each step.
        """
        # The deviation is not passed to `add_` as ``alpha``, because a CPU rounds ``alpha`` to the
        # gradients' dtype. In bf16 the noise could be up to 0.4 % too small.
        if deviation := self.noise_multiplier * self.max_grad_norm:
            own = own_share(gradient) if self.parallel == "ddp" else gradient
            if len(self.noise_weights) > 1:
                own.add_(self.correlated.draw(own, deviation, number, self.generator))
            else:
                own.add_(torch.empty_like(own).normal_(std=deviation, generator=self.generator))
        gradient.div_(self.joint_batch_size)

    def update(self) -> None:
        """Turn the sums into noisy means, and let the optimizer step with these means."""
        self.reduce_all(self.take_sums().finish())
        reductions, self._reductions = self._reductions, []
        self.noisy_step(reductions)

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
                for parameter, piece in zip(each.parameters, each.views(each.wait()), strict=True):
                    parameter.grad = as_gradient(piece, parameter)
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)


AT_ONCE = 4
"""Number of reductions that may be unfinished at the same time under FSDP2. When `reduce` begins
another reduction, it waits for the oldest, because the buffer that a reduction sends stays in
memory until then."""


def check_together(parameters: list[nn.Parameter]) -> None:
    """Raise if parameters are on several devices."""
    devices = {str(parameter.device) for parameter in parameters}
    if len(devices) > 1:
        raise ConfigurationError(
            f"all trained parameters must be on one device, not on {' and '.join(sorted(devices))}"
        )
