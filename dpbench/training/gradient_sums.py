"""The sums of clipped gradients: where they are put, and the factors of what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 128
"""Each part of a buffer begins at a multiple of this many elements, for matrix products."""


class Buffer(NamedTuple):
    """Flat memory, and each parameter's part of it, in the parameter's shape."""

    flat: Tensor
    places: dict[Tensor, Tensor]
    number: int = 0
    """Its index among several."""


def one_buffer(
    parameters: Sequence[Tensor], dtype: torch.dtype | None = None, ranks: int = 1, number: int = 0
) -> Buffer:
    """A buffer that is not yet filled.

    Each of ``ranks`` gets a part of every parameter's rows, which are padded to equal parts.
    """
    sizes = [-(-ranks * part_size(p, ranks) // ALIGNED) * ALIGNED for p in parameters]
    first = parameters[0]
    flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return Buffer(flat, {p: part[: p.numel()].view(p.shape) for p, part in parts}, number)


def part_size(parameter: Tensor, ranks: int) -> int:
    """The most elements that the rows of one rank have."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


LARGE = 2**18
"""A parameter with at least this many elements has its own gradient buffer."""


def in_buffers(
    parameters: Sequence[Tensor], groups: Mapping[Tensor, int] | None = None
) -> list[list[Tensor]]:
    """The parameters by their gradient buffer; small ones of a group share one."""
    small: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() < LARGE:
            group = groups.get(parameter, -1) if groups else 0
            small.setdefault(group, []).append(parameter)
    return [[p] for p in parameters if p.numel() >= LARGE] + [*small.values()]


class Sums:
    """The sums of clipped gradients, each in its place in a buffer: see `in_buffers`.

    A buffer is allocated on first use, so that inputs freed until then make room for it.

    Args:
        sharing: the parameters whose gradients are summed, by their buffer.
        dtype: the type of the sums, if not that of the parameters.
        ranks: how many ranks will share them, see `one_buffer`.
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
        """Allocate all buffers, and have every sum added to what is there, zeros at first."""
        for parameter in self._number:
            self._place(parameter).zero_()
            self._filled.add(parameter)
        return [*self._made.values()]

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Add a sum to those before."""
        place = self._place(parameter)
        if self._is_first(parameter):
            place.copy_(total)
        else:
            place.add_(total)

    def put_scaled(self, parameter: Tensor, gradient: Tensor, factor: Tensor) -> None:
        """Add ``gradient × factor``, a factor of one element."""
        place = self._place(parameter)
        if self._is_first(parameter):
            torch.mul(gradient, factor, out=place)
        else:
            place.addcmul_(gradient, factor)

    def put_all(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Add many small sums with few launches."""
        places = [self._place(parameter) for parameter in totals]
        first = [self._is_first(parameter) for parameter in totals]
        for into, sums in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
            those = [n for n, each in enumerate(first) if each is sums]
            parts = [*totals.values()]
            if those:
                into([places[n] for n in those], [parts[n] for n in those])

    def put_made(self, parameter: Tensor, make: Callable[[Tensor], object]) -> None:
        """Add what a function writes into a flat tensor, at best into the buffer itself."""
        place = self._place(parameter).view(-1)
        if self._is_first(parameter):
            make(place)
        else:
            total = torch.empty_like(place)
            make(total)
            place.add_(total)

    def put_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``, written directly into the buffer if the types agree."""
        place = self._place(parameter)
        if place.dtype != a.dtype:
            self.put(parameter, a @ b)
        elif self._is_first(parameter):
            torch.mm(a, b, out=place)
        else:
            place.addmm_(a, b)

    def put_rows(self, parameter: Tensor, rows: Tensor, totals: Tensor) -> None:
        """Add each of ``totals`` to the row of that index; other rows get zeros."""
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

    def close(self, parameters: Iterable[Tensor] | None = None) -> Iterator[Buffer]:
        """Take out each buffer once nothing more will be added to it.

        Args:
            parameters: those whose last sum was added, zeros where none was. All by default.
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
    """Each example's clipping factor, in the forms that sums need.

    Args:
        exact: ``[B]``, float32.
        scaled: the function of that name, or one that computes the same.
    """

    def __init__(self, exact: Tensor, scaled: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.exact, self._scaled = exact, scaled
        self._by_token: dict[tuple[torch.dtype, int], Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """`scaled`, computed once for successive layers with the same input."""
        if self._last is None or not is_same_memory(self._last[0], tensor):
            self._last = None  # free it before making another
            self._last = tensor, self._scaled(tensor, self.exact)
        return self._last[1]

    def by_token(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """`rounded_down`, for the tokens of one example after another, ``[B · tokens]``."""
        if (dtype, tokens) not in self._by_token:
            rounded = rounded_down(self.exact, dtype)
            self._by_token[dtype, tokens] = rounded.repeat_interleave(tokens)
        return self._by_token[dtype, tokens]


def add_rows(place: Tensor, rows: Tensor, totals: Tensor) -> None:
    """Add each of ``totals`` to the row of that index."""
    if place.itemsize == 2:  # summed one by one in bf16, 256 + 1 = 256
        rows, totals = summed_by_row(rows, totals)
    place.index_add_(0, rows, totals.to(place.dtype))


def summed_by_row(rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Unique rows ``[N]``, and their sums ``[N, K]`` in float32.

    No shape depends on values, so that a CUDA graph can hold it: each repetition leaves a row 0 of
    zeros at the end.
    """
    order = rows.argsort()
    rows = rows[order]
    begins = torch.cat([rows.new_zeros(1), (rows[1:] != rows[:-1]).long()])[: len(rows)]
    slot = begins.cumsum(0)
    sums = totals.new_zeros(totals.shape, dtype=torch.float32)
    sums.index_add_(0, slot, totals[order].float())
    return torch.zeros_like(rows).index_copy_(0, slot, rows), sums


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two live tensors are the same data; works without memory, too."""
    first, second = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        for t in (one, other)
    )
    return first == second


def scaled(tensor: Tensor, factors: Tensor) -> Tensor:
    """Each example's part times its factor, multiplied in float32 and rounded once.

    A factor rounded down to bf16 would be up to 0.8 % smaller, and so would the example's part.

    Args:
        tensor: ``[B, T, N]``.
        factors: ``[B]``, float32.
    """
    return torch.mul(tensor, factors[:, None, None], out=torch.empty_like(tensor))


def rounded_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in another type, rounded down: rounding must not raise an example's part."""
    rounded = factors.to(dtype)
    if dtype == factors.dtype:
        return rounded
    lower = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded > factors, lower, rounded)
