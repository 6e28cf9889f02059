"""Sums of clipped gradients, the buffers that hold the sums, and per-sample gradients to sum up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.training.kernels import weighted_sum
from dpbench.training.norms import GhostNorms, rounded_down

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
    sizes = [-(-ranks * part_size(p, ranks) // ALIGNED) * ALIGNED for p in parameters]
    first = parameters[0]
    flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return Buffer(flat, {p: part[: p.numel()].view(p.shape) for p, part in parts}, number)


def part_size(parameter: Tensor, ranks: int) -> int:
    """Return the number of elements in the largest shard of a parameter under FSDP2."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


LARGE = 2**18
"""A parameter with at least this many elements has its own buffer."""


def in_buffers(
    parameters: Sequence[Tensor], groups: Mapping[Tensor, int] | None = None
) -> list[list[Tensor]]:
    """Divide parameters among buffers. Small parameters of the same group share a buffer.

    Args:
        parameters: all trained parameters.
        groups: for each parameter the index of its group; None if all parameters are in one group.
    """
    small: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() < LARGE:
            group = groups.get(parameter, -1) if groups else 0
            small.setdefault(group, []).append(parameter)
    return [[p] for p in parameters if p.numel() >= LARGE] + [*small.values()]


class Sums:
    """Sums of clipped gradients, one for each parameter, as views of buffers.

    A buffer is allocated on first use. By then, some activations may have been freed.

    Args:
        sharing: the parameters of each buffer, from `in_buffers`.
        dtype: dtype of the sums; None for the dtype of the parameters.
        ranks: number of ranks over which FSDP2 will distribute the sums.
    """

    def __init__(
        self,
        sharing: Sequence[Sequence[Tensor]],
        dtype: torch.dtype | None = None,
        ranks: int = 1,
    ) -> None:
        self._dtype, self._ranks = dtype, ranks
        self._sharing = dict(enumerate(sharing))
        self._number = {p: n for n, sharing in self._sharing.items() for p in sharing}
        self._made: dict[int, Buffer] = {}
        self._filled: set[Tensor] = set()
        self._closed: set[Tensor] = set()
        self._left = {number: len(sharing) for number, sharing in self._sharing.items()}

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

    def add_scaled(self, parameter: Tensor, gradient: Tensor, factor: Tensor) -> None:
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
        parts = [*totals.values()]
        for combine, first in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
            chosen = [n for n, each in enumerate(is_first) if each is first]
            if chosen:
                combine([places[n] for n in chosen], [parts[n] for n in chosen])

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
        """Add ``a @ b`` to the sum of a parameter.

        If ``a`` has the dtype of the sum, the product is computed directly in the buffer.
        """
        place = self._place(parameter)
        if place.dtype != a.dtype:
            self.add(parameter, a @ b)
        elif self._is_first(parameter):
            torch.mm(a, b, out=place)
        else:
            place.addmm_(a, b)

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
        add_rows(place, rows, totals)

    def _place(self, parameter: Tensor) -> Tensor:
        number = self._number[parameter]
        if number not in self._made:
            sharing = self._sharing[number]
            self._made[number] = one_buffer(sharing, self._dtype, self._ranks, number)
        return self._made[number].places[parameter]

    def _is_first(self, parameter: Tensor) -> bool:
        first = parameter not in self._filled
        self._filled.add(parameter)
        return first

    def finish(self, parameters: Iterable[Tensor] | None = None) -> Iterator[Buffer]:
        """Finish the sums of some parameters, and yield each buffer whose sums are all finished.

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
            number = self._number[parameter]
            self._left[number] -= 1
            if not self._left[number]:
                yield self._made.pop(number)


class Factors:
    """The clipping factors of a batch, and tensors that were multiplied by them.

    Args:
        exact: the factors ``[B]``, float32 or wider.
        scaled: `dpbench.training.kernels.multiplied`, or `dpbench.training.kernels.scaled`.
    """

    def __init__(self, exact: Tensor, scaled: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.exact, self._scaled = exact, scaled
        self._by_token: dict[tuple[torch.dtype, int], Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor by the factors. Reuse the last result if the tensor is the same."""
        if self._last is None or not is_same_memory(self._last[0], tensor):
            self._last = None  # frees the memory before more is allocated
            self._last = tensor, self._scaled(tensor, self.exact)
        return self._last[1]

    def by_token(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """Return the factors, rounded down and repeated for each token, ``[B · tokens]``."""
        if (dtype, tokens) not in self._by_token:
            rounded = rounded_down(self.exact, dtype)
            self._by_token[dtype, tokens] = rounded.repeat_interleave(tokens)
        return self._by_token[dtype, tokens]


def add_rows(place: Tensor, rows: Tensor, totals: Tensor) -> None:
    """Add to rows of a tensor, as in `Sums.add_rows`."""
    if place.itemsize == 2:  # in bf16, 256 + 1 = 256, so a sum of small numbers would stop growing
        rows, totals = summed_by_row(rows, totals)
    place.index_add_(0, rows, totals.to(place.dtype))


def summed_by_row(rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the totals of equal row indices in float32.

    The shapes of all tensors are independent of the data, so that a CUDA graph can contain this
    function. So the results have as many entries as the arguments. The entries that repeated
    indices leave over have index 0 and a sum of zeros.

    Returns:
        The distinct indices ``[n]``, and their sums ``[n, columns]``.
    """
    order = rows.argsort()
    rows = rows[order]
    begins = torch.cat([rows.new_zeros(1), (rows[1:] != rows[:-1]).long()])[: len(rows)]
    slot = begins.cumsum(0)
    sums = totals.new_zeros(totals.shape, dtype=torch.float32)
    sums.index_add_(0, slot, totals[order].float())
    return torch.zeros_like(rows).index_copy_(0, slot, rows), sums


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors view the same memory in the same way. Fake tensors also work."""
    first, second = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        for t in (one, other)
    )
    return first == second


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
            parts = [(each := small.pop(p)).reshape(len(each), p.numel()) for p in alike]
            rest = -sum(part.shape[1] for part in parts) % ROW
            parts.append(parts[0].new_zeros(len(parts[0]), rest))
            self._joined.append((alike, torch.cat(parts, 1)))

    def squared_norms(self) -> list[Tensor]:
        """Return for each part of the gradient the squared norms of all examples, ``[B]``."""
        norms = GhostNorms()
        for (first, *_), samples in self._joined:
            norms.add_samples(samples.unflatten(1, (-1, ROW)), first.dtype)
        for parameter, samples in self._large.items():
            norms.add_samples(samples, parameter.dtype)
        return norms.squared_norms()

    def add_small(self, factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of all small parameters to ``sums``."""
        while self._joined:
            parameters, samples = self._joined.pop()
            total = samples.new_empty(samples.shape[1], dtype=parameters[0].dtype)
            weighted_sum(samples, factors, total)
            sizes = [parameter.numel() for parameter in parameters]
            parts = total[: sum(sizes)].split(sizes)
            totals = zip(parameters, parts, strict=True)
            sums.add_many({parameter: part.view(parameter.shape) for parameter, part in totals})

    def add_large(self, parameters: Collection[Tensor], factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of the large parameters among ``parameters`` to ``sums``.

        The per-sample gradients of these parameters are freed.
        """
        for parameter in parameters:
            if parameter in self._large:
                samples = self._large.pop(parameter).flatten(1)
                sums.add_written(parameter, partial(weighted_sum, samples, factors))
