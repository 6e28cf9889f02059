"""The sums of clipped gradients: where they are put, and the factors of what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNED = 128
"""Elements to a multiple of which each part of a buffer begins, as matrix products want it."""


def one_buffer(
    parameters: Sequence[Tensor], dtype: torch.dtype | None = None
) -> tuple[Tensor, dict[Tensor, Tensor]]:
    """A flat buffer, not yet filled, and the part of it that each parameter has, in its shape."""
    sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in parameters]
    flat = parameters[0].new_empty(sum(sizes), dtype=dtype)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return flat, {p: part[: p.numel()].view_as(p) for p, part in parts}


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
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self.places: dict[Tensor, Tensor] = {}
        self._dtype = dtype
        self._buffers = in_buffers(parameters)
        self._made: list[Tensor | None] = [None] * len(self._buffers)
        self._number = {p: n for n, sharing in enumerate(self._buffers) for p in sharing}
        self._filled: set[Tensor] = set()

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
        if parameter not in self.places:
            number = self._number[parameter]
            self._made[number], places = one_buffer(self._buffers[number], self._dtype)
            self.places |= places
        return self.places[parameter]

    def _is_first(self, parameter: Tensor) -> bool:
        first = parameter not in self._filled
        self._filled.add(parameter)
        return first

    def finish(self) -> list[Tensor]:
        """The buffers, once zeros are where nobody has put anything."""
        for parameter in self._number.keys() - self._filled:
            self._place(parameter).zero_()
        self._filled.clear()
        return [buffer for buffer in self._made if buffer is not None]


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
