"""Sums over ranks that run while others are still computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from dpbench.training.gradient_sums import Buffer, part_size

REDUCED_TOGETHER = 2**26
"""Bytes of buffers that are reduced in one go, while the next are filled."""


class Share:
    """What a rank has of the sum of a buffer: of each parameter all, or under FSDP2 its shard."""

    def __init__(self, buffer: Buffer, flat: Tensor, sizes: Sequence[int] = ()) -> None:
        self.number, self.flat = buffer.number, flat
        self.parameters: list[Any] = [*buffer.places]
        self._sizes = sizes
        self._places = [] if sizes else [*buffer.places.values()]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Of a tensor that is like ``flat``, what belongs to each parameter."""
        if not self._sizes:
            return self._places
        pieces = zip(self.parameters, flat.split(self._sizes), strict=True)
        shards = [(parameter.to_local().shape, piece) for parameter, piece in pieces]
        return [piece[: shape.numel()].view(shape) for shape, piece in shards]


class Reduction:
    """The sums of some buffers over the ranks, which begin at once.

    Under DDP each rank gets all of them, in place. Under FSDP2 each gets the rows of its shards: a
    large parameter lies alone in its buffer, its rows in the order of the ranks, and is sent from
    there; small ones are copied together first.

    Args:
        buffers: with room for `dpbench.training.gradient_sums.one_buffer`'s ``ranks``.
        parallel: see `dpbench.core.case.PARALLELS`; with ``none`` there is nothing to wait for.
    """

    def __init__(self, buffers: Sequence[Buffer], parallel: str) -> None:
        self._works: list[Any] = []
        self._sent: list[Tensor] = []  # until nobody reads them
        if parallel == "fsdp2":
            self._scatter(buffers)
            return
        self._shares = [Share(buffer, buffer.flat) for buffer in buffers]
        if parallel == "ddp":
            flats = [buffer.flat for buffer in buffers]
            self._works = [distributed.all_reduce(flat, async_op=True) for flat in flats]

    def _scatter(self, buffers: Sequence[Buffer]) -> None:
        first: Any = next(iter(buffers[0].places))
        group = first.device_mesh.get_group()
        ranks = group.size()
        self._shares = []
        for buffer in buffers:
            sizes = [part_size(parameter, ranks) for parameter in buffer.places]
            begins = [place.storage_offset() for place in buffer.places.values()]
            begins = [begin - buffer.flat.storage_offset() for begin in begins]
            rows = [
                buffer.flat[begin : begin + ranks * size].view(ranks, size)
                for begin, size in zip(begins, sizes, strict=True)
            ]
            self._sent.append((rows[0] if len(rows) == 1 else torch.cat(rows, 1)).flatten())
            self._shares.append(Share(buffer, buffer.flat.new_empty(sum(sizes)), sizes))
        own = [share.flat for share in self._shares]
        options = distributed.ReduceScatterOptions()
        options.asyncOp = True
        self._works = [group.reduce_scatter_tensor_coalesced(own, self._sent, options)]

    def wait(self) -> list[Share]:
        """What this rank has of the sums; on a GPU, the work that follows waits for them."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._shares


def taken(layers: Iterator[list[Buffer]], least: float | None = None) -> list[Buffer]:
    """The buffers of the next layers, which have so many bytes together, or of the last ones."""
    some: list[Buffer] = []
    for buffers in layers:
        some += buffers
        if sum(each.flat.nbytes for each in some) >= (least or REDUCED_TOGETHER):
            break
    return some


def as_gradient(part: Tensor, parameter: Any) -> Tensor:
    """What a parameter has of a sum as the gradient that its optimizer wants."""
    part = part.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return part
    gradient: Tensor = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return gradient
