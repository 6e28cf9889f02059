"""The sums of clipped gradients: their buffers, and the clipping factors of what is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 128
"""Each part of a buffer begins at a multiple of this many elements, for fast matrix products."""


class Buffer(NamedTuple):
    """Flat memory, and each parameter's part of it, in the parameter's shape."""

    flat: Tensor
    places: dict[Tensor, Tensor]
    number: int = 0
    """Its index among the buffers."""


def one_buffer(
    parameters: Sequence[Tensor], dtype: torch.dtype | None = None, ranks: int = 1, number: int = 0
) -> Buffer:
    """Allocate a buffer for these parameters, without initial values.

    For ``ranks`` > 1, each parameter's rows are padded so that they split equally over the ranks.
    """
    sizes = [-(-ranks * part_size(p, ranks) // ALIGNED) * ALIGNED for p in parameters]
    first = parameters[0]
    flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return Buffer(flat, {p: part[: p.numel()].view(p.shape) for p, part in parts}, number)


def part_size(parameter: Tensor, ranks: int) -> int:
    """The largest number of a parameter's elements that one rank has under FSDP2."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


LARGE = 2**18
"""A parameter with at least this many elements has its own gradient buffer."""


def in_buffers(
    parameters: Sequence[Tensor], groups: Mapping[Tensor, int] | None = None
) -> list[list[Tensor]]:
    """Group parameters into gradient buffers; the small parameters of a group share one."""
    small: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() < LARGE:
            group = groups.get(parameter, -1) if groups else 0
            small.setdefault(group, []).append(parameter)
    return [[p] for p in parameters if p.numel() >= LARGE] + [*small.values()]


class Sums:
    """The sums of clipped gradients, one per parameter, as views of buffers; see `in_buffers`.

    A buffer is allocated on first use, when some activations have been freed.

    Args:
        sharing: the parameters of each buffer.
        dtype: the dtype of the sums, if not the parameters'.
        ranks: how many ranks will share the sums; see `one_buffer`.
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
        """Allocate all buffers with zeros, so that even the first sum is added, not copied."""
        for parameter in self._number:
            self._place(parameter).zero_()
            self._filled.add(parameter)
        return [*self._made.values()]

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Add ``total`` to a parameter's sum."""
        place = self._place(parameter)
        if self._is_first(parameter):
            place.copy_(total)
        else:
            place.add_(total)

    def put_scaled(self, parameter: Tensor, gradient: Tensor, factor: Tensor) -> None:
        """Add ``gradient × factor`` to a parameter's sum; the factor has one element."""
        place = self._place(parameter)
        if self._is_first(parameter):
            torch.mul(gradient, factor, out=place)
        else:
            place.addcmul_(gradient, factor)

    def put_all(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Add to the sums of many small parameters, with few launches."""
        places = [self._place(parameter) for parameter in totals]
        first = [self._is_first(parameter) for parameter in totals]
        for into, sums in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
            those = [n for n, each in enumerate(first) if each is sums]
            parts = [*totals.values()]
            if those:
                into([places[n] for n in those], [parts[n] for n in those])

    def put_made(self, parameter: Tensor, make: Callable[[Tensor], object]) -> None:
        """Add what ``make`` writes into a flat tensor; the first time, into the buffer itself."""
        place = self._place(parameter).view(-1)
        if self._is_first(parameter):
            make(place)
        else:
            total = torch.empty_like(place)
            make(total)
            place.add_(total)

    def put_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``; it is computed into the buffer if the dtypes agree."""
        place = self._place(parameter)
        if place.dtype != a.dtype:
            self.put(parameter, a @ b)
        elif self._is_first(parameter):
            torch.mm(a, b, out=place)
        else:
            place.addmm_(a, b)

    def put_rows(self, parameter: Tensor, rows: Tensor, totals: Tensor) -> None:
        """Add each of ``totals`` to the row with that index; other rows do not change."""
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
        """Finish the sums of some parameters; yield each buffer all of whose sums are finished.

        Args:
            parameters: those to which nothing more is added; all by default. A sum to which
                nothing was added is zero.
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
    """Each example's clipping factor, in the forms that the sums need.

    Args:
        exact: ``[B]``, float32.
        scaled: `scaled`, or a faster function with the same result.
    """

    def __init__(self, exact: Tensor, scaled: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.exact, self._scaled = exact, scaled
        self._by_token: dict[tuple[torch.dtype, int], Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """`scaled`, with the result cached for successive layers that share their input."""
        if self._last is None or not is_same_memory(self._last[0], tensor):
            self._last = None  # free it before making another
            self._last = tensor, self._scaled(tensor, self.exact)
        return self._last[1]

    def by_token(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """The factors rounded down and repeated for each token, ``[B · tokens]``."""
        if (dtype, tokens) not in self._by_token:
            rounded = rounded_down(self.exact, dtype)
            self._by_token[dtype, tokens] = rounded.repeat_interleave(tokens)
        return self._by_token[dtype, tokens]


def add_rows(place: Tensor, rows: Tensor, totals: Tensor) -> None:
    """Add each of ``totals`` to the row with that index."""
    if place.itemsize == 2:  # summed one by one in bf16, 256 + 1 = 256
        rows, totals = summed_by_row(rows, totals)
    place.index_add_(0, rows, totals.to(place.dtype))


def summed_by_row(rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows with equal indices; return unique indices ``[N]`` and sums ``[N, K]`` in float32.

    No shape depends on data, so a CUDA graph can hold it. Each repetition leaves an entry at the
    end that adds zeros to row 0.
    """
    order = rows.argsort()
    rows = rows[order]
    begins = torch.cat([rows.new_zeros(1), (rows[1:] != rows[:-1]).long()])[: len(rows)]
    slot = begins.cumsum(0)
    sums = totals.new_zeros(totals.shape, dtype=torch.float32)
    sums.index_add_(0, slot, totals[order].float())
    return torch.zeros_like(rows).index_copy_(0, slot, rows), sums


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two live tensors view the same data; also works for tensors without data."""
    first, second = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        for t in (one, other)
    )
    return first == second


def scaled(tensor: Tensor, factors: Tensor) -> Tensor:
    """Multiply each example by its factor, in float32, and round once.

    A factor rounded down to bf16 first would make an example up to 0.8 % smaller.

    Args:
        tensor: ``[B, T, N]``.
        factors: ``[B]``, float32.
    """
    return torch.mul(tensor, factors[:, None, None], out=torch.empty_like(tensor))


def rounded_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Round factors down to another dtype, so that no example is scaled above its threshold."""
    rounded = factors.to(dtype)
    if dtype == factors.dtype:
        return rounded
    lower = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded > factors, lower, rounded)
