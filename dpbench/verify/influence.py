"""Follows which tensors depend on which data, through all operators that PyTorch dispatches.

Data is marked where it enters: in a data loader's batch. Each operator's results then depend on all
that the operator reads. What passes through Python numbers, NumPy or a kernel that PyTorch does not
dispatch is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

MADE = 1
"""The bit of tensors that are made of parameters, constants and random numbers, and of no data."""

READS_NO_VALUES = re.compile(r"(new_|empty|zeros|ones|full|rand|_amp_update)\w*|\w+_like")
"""Operators that read only the shapes of their arguments, or whether gradients are finite."""

OVERWRITES = re.compile(r"(_foreach_)?(zero|fill|copy|normal|uniform|exponential|random)_")
"""Operators in place that do not read what they replace."""

BY_INDEX = re.compile(r"_(foreach|fused)_\w+")
"""Operators on lists of tensors, where each entry depends on the entries at its own index."""

MOST_EXPIRED = 10_000
"""Number of marked storages after which the storages that no longer exist are forgotten."""


class Influences(TorchDispatchMode):
    """Keeps the sources that each storage depends on, as the bits of a number.

    Attributes:
        leaves: the tensors that have been changed in place, and require gradients or are running
            statistics, with the sources of all changes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._most = MOST_EXPIRED
        self.leaves = WeakTensorKeyDictionary()
        self.is_paused = False

    def of(self, value: Any) -> int:
        """Return the sources of all tensors in a value."""
        return reduce(or_, (self._known(tensor)[0] for tensor in tensors_in(value)), 0)

    def data_rows(self, tensor: Tensor) -> int:
        """Return the number of a tensor's rows that have sources, as far as `torch.cat` shows."""
        sources, others = self._known(tensor)
        return len(tensor) - others if sources and not sources & MADE else 0

    def _known(self, tensor: Tensor) -> tuple[int, int]:
        """Return the sources of a tensor, and the number of its rows without any."""
        storage = _storage(tensor)
        return self._storages.get(storage._cdata, (None, 0, 0))[1:] if storage else (0, 0)

    def assign(self, tensor: Tensor, sources: int, others: int = 0) -> None:
        """Replace the sources of a tensor, and of all tensors that share its storage."""
        if storage := _storage(tensor):
            if sources:
                self._storages[storage._cdata] = StorageWeakRef(storage), sources, others
            else:
                self._storages.pop(storage._cdata, None)
        if len(self._storages) > self._most:
            alive = {key: each for key, each in self._storages.items() if not each[0].expired()}
            self._storages, self._most = alive, MOST_EXPIRED + 2 * len(alive)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not follow operators meanwhile."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.is_paused:
            return out
        if READS_NO_VALUES.fullmatch(name):
            for tensor in tensors_in(out):
                self.assign(tensor, MADE)
        else:
            named = {a.name: a for a in func._schema.arguments}
            given = dict(zip(named, args, strict=False)) | (kwargs or {})
            written = {n for n in given if (i := named[n].alias_info) and i.is_write}
            if given.get("training"):  # of batch norm, whose schema does not say what is written
                written |= {n for n in given if n.startswith("running_")}
            overwrites = bool(OVERWRITES.fullmatch(name)) or written == {"out"}
            if BY_INDEX.fullmatch(name):
                lists = [v for v in (*given.values(), out) if isinstance(v, (list, tuple))]
                for i in range(max(map(len, lists), default=0)):
                    at = {n: _entry(v, i) for n, v in given.items()}
                    self._follow(at, written, _entry(out, i), overwrites)
            else:
                self._follow(given, written, out, overwrites)
            if name == "cat" and not given.get("dim") and out.ndim and self.of(out):
                rows = sum(map(self.data_rows, given["tensors"]))
                self.assign(out, self.of(out), len(out) - rows)
        return out

    def _follow(
        self, given: Mapping[str, Any], written: set[str], out: Any, overwrites: bool
    ) -> None:
        read = [*tensors_in([v for n, v in given.items() if not (overwrites and n in written)])]
        sources = self.of(read) & ~MADE
        if all(self.of(each) & MADE or isinstance(each, nn.Parameter) for each in read):
            sources |= MADE
        for name in written:
            for tensor in tensors_in(given[name]):
                if (tensor.requires_grad and tensor.is_leaf) or name.startswith("running_"):
                    self.leaves[tensor] = self.leaves.get(tensor, 0) | sources
        data = [each for each in read if each.ndim and self.data_rows(each)]
        for tensor in tensors_in([out, *(given[name] for name in written)]):
            storage = _storage(tensor)
            whole = storage and storage.nbytes() == tensor.numel() * tensor.itemsize
            rows = [len(t) - self.data_rows(t) for t in data if t.shape[:1] == tensor.shape[:1]]
            before = 0 if overwrites and whole else self.of(tensor) & ~MADE
            self.assign(tensor, sources | before, min(rows, default=0))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, also in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def _entry(value: Any, i: int) -> Any:
    """Return entry ``i`` of a list of tensors; any other value is shared by all entries."""
    return (value[i] if i < len(value) else None) if isinstance(value, (list, tuple)) else value


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a subclass without storage
        return None
