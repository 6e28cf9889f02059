"""Sums of gradient buffers over ranks, which can be computed while other kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from dpbench.training.gradient_sums import Buffer, part_size

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
        buffer: a buffer that `dpbench.training.gradient_sums.one_buffer` has made for this number
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
        self._sizes = [part_size(p, ranks) for p in self.parameters]
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
        """Return this rank's part of the sum. On a GPU, later kernels wait, but Python does not."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._flat

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Divide ``flat``, which has the shape of the sum, into a view for each parameter or shard.

        Without FSDP2, ``flat`` must be the sum itself.
        """
        if not self._sharded:
            return self._places
        pieces = zip(self.parameters, flat.split(self._sizes), strict=True)
        shards = [(parameter.to_local().shape, piece) for parameter, piece in pieces]
        return [piece[: shape.numel()].view(shape) for shape, piece in shards]


def as_gradient(part: Tensor, parameter: Any) -> Tensor:
    """Convert a parameter's part of a sum into a gradient that the optimizer accepts."""
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
