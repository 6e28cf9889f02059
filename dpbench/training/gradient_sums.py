"""The sums of clipped gradients: where they are put, and the factors of what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 128
"""Elements to a multiple of which each part of a buffer begins, as matrix products want it."""


class Buffer(NamedTuple):
    """Flat memory, and the part of it that each parameter has, in its shape."""

    flat: Tensor
    places: dict[Tensor, Tensor]
    number: int = 0
    """Which of several it is."""


def one_buffer(
    parameters: Sequence[Tensor], dtype: torch.dtype | None = None, ranks: int = 1, number: int = 0
) -> Buffer:
    """A buffer that is not yet filled.

    Of ``ranks`` each gets a part of every parameter's rows: after them is room for as many as make
    the parts equal.
    """
    sizes = [-(-ranks * part_size(p, ranks) // ALIGNED) * ALIGNED for p in parameters]
    first = parameters[0]
    flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return Buffer(flat, {p: part[: p.numel()].view(p.shape) for p, part in parts}, number)


def part_size(parameter: Tensor, ranks: int) -> int:
    """Elements of the rows that one of the ranks has, at most."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


LARGE = 2**18
"""From so many elements on, a parameter's gradient has a buffer of its own."""


def in_buffers(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters by the buffer that their gradients have: small ones share one."""
    small = [p for p in parameters if p.numel() < LARGE]
    return [[p] for p in parameters if p.numel() >= LARGE] + ([small] if small else [])


class Sums:
    """The sums of clipped gradients, each in its place of a buffer: see `in_buffers`.

    A buffer is made when something is first put there, so that large ones need not be there before
    what they are computed from begins to go.

    Args:
        parameters: whose gradients are summed.
        dtype: of the sums, if it is not that of the parameters.
        ranks: among which they will be shared out, see `one_buffer`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], dtype: torch.dtype | None = None, ranks: int = 1
    ) -> None:
        self._dtype, self._ranks = dtype, ranks
        self._sharing = dict(enumerate(in_buffers(parameters)))
        self._number = {p: n for n, sharing in self._sharing.items() for p in sharing}
        self._made: dict[int, Buffer] = {}
        self._filled: set[Tensor] = set()
        self._closed: set[Tensor] = set()
        self._left = {number: len(sharing) for number, sharing in self._sharing.items()}

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Add a sum to those before."""
        place = self._place(parameter)
        if self._is_first(parameter):
            place.copy_(total)
        else:
            place.add_(total)

    def put_scaled(self, parameter: Tensor, gradient: Tensor, factor: Tensor) -> None:
        """The same of ``gradient × factor``, of one element."""
        place = self._place(parameter)
        if self._is_first(parameter):
            torch.mul(gradient, factor, out=place)
        else:
            place.addcmul_(gradient, factor)

    def put_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """The same of ``a @ b``, written where it belongs if that has its type."""
        place = self._place(parameter)
        if place.dtype != a.dtype:
            self.put(parameter, a @ b)
        elif self._is_first(parameter):
            torch.mm(a, b, out=place)
        else:
            place.addmm_(a, b)

    def put_rows(self, parameter: Tensor, rows: Tensor, totals: Tensor) -> None:
        """The same of ``totals``, each for the row of that number; other rows have zeros."""
        place = self._place(parameter)
        if self._is_first(parameter):
            place.zero_()
        if place.itemsize == 2:  # one after another, a GPU's sum of equal numbers ends at 256
            rows, totals = summed_by_row(rows, totals)
        place.index_add_(0, rows, totals.to(place.dtype))

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
        """Take out each buffer as soon as nothing is put there any more.

        Args:
            parameters: for which the last sum has been put, or none: these have zeros. All by
                default.
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
    """What each example's gradient is multiplied by, in the forms that sums want.

    Args:
        exact: ``[B]``, float32.
        scaled: the function of that name, or one that computes the same.
    """

    def __init__(self, exact: Tensor, scaled: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._exact, self._scaled = exact, scaled
        self._by_token: dict[tuple[torch.dtype, int], Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """`scaled`; once for layers that follow each other and were given the same."""
        if self._last is None or not is_same_memory(self._last[0], tensor):
            self._last = None  # before there is another
            self._last = tensor, self._scaled(tensor, self._exact)
        return self._last[1]

    def by_token(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """`rounded_down`, for the tokens of one example after another, ``[B · tokens]``."""
        if (dtype, tokens) not in self._by_token:
            rounded = rounded_down(self._exact, dtype)
            self._by_token[dtype, tokens] = rounded.repeat_interleave(tokens)
        return self._by_token[dtype, tokens]


def summed_by_row(rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[N]`` that are named once, and their sums ``[N, K]`` in float32.

    No shape depends on values, so that a CUDA graph can hold it: for each row that was named again
    there is a row 0 of zeros at the end.
    """
    order = rows.argsort()
    rows = rows[order]
    begins = torch.cat([rows.new_zeros(1), (rows[1:] != rows[:-1]).long()])[: len(rows)]
    slot = begins.cumsum(0)
    sums = totals.new_zeros(totals.shape, dtype=torch.float32)
    sums.index_add_(0, slot, totals[order].float())
    return torch.zeros_like(rows).index_copy_(0, slot, rows), sums


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, both alive, are the same numbers; tensors without memory as well."""
    first, second = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        for t in (one, other)
    )
    return first == second


def scaled(tensor: Tensor, factors: Tensor) -> Tensor:
    """Each example's part times its factor, multiplied in float32 and rounded once.

    A factor rounded down to bf16 would be up to 0.8 % less, and all that an example adds with it.

    Args:
        tensor: ``[B, T, N]``.
        factors: ``[B]``, float32.
    """
    return torch.mul(tensor, factors[:, None, None], out=torch.empty_like(tensor))


def rounded_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in another type, none larger than before: rounding must not raise what one adds."""
    rounded = factors.to(dtype)
    if dtype == factors.dtype:
        return rounded
    lower = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded > factors, lower, rounded)
