"""Counts operators as they run on tensors with data, for scripts and functions."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from dpbench.child.failures import InstrumentError
from dpbench.child.recorder import Recorder, on_cuda
from dpbench.core.subject import Subject
from dpbench.results.kernels import OperatorCount
from dpbench.results.rows import Measurement

if TYPE_CHECKING:
    from dpbench.instruments.logical.counter import RealTensorCounter


class NothingCounted(InstrumentError):
    """No PyTorch operator ran in the steps: they use JAX, say, or replay a CUDA graph."""

    remedy = "train with PyTorch operators in each step, or use cupti on a GPU for other libraries"


class LogicalRecorder(Recorder):
    """Records logical bytes and FLOPs of each step."""

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        # Of each step: its operators, and most live bytes by phase.
        self._steps: list[tuple[Sequence[OperatorCount], Mapping[str, int]]] = []
        self._assumed = Counter[str]()

    @cached_property
    def listener(self) -> RealTensorCounter:
        import torch

        from dpbench.instruments.logical.counter import RealTensorCounter
        from dpbench.instruments.logical.memory import resizing_seen

        counter = RealTensorCounter()
        gc.collect()
        self.held.enter_context(new_objects_collected())
        self.held.enter_context(resizing_seen(counter.memory))
        self.held.enter_context(counter)
        # Dynamo cannot compile under a dispatch mode, and raises an error for ``fullgraph``.
        self.held.enter_context(torch.compiler.set_stance("force_eager"))
        return counter

    def end_step(self) -> None:
        super().end_step()
        self.operators = self.listener.operators
        self._steps.append((self.operators, self.listener.peaks))
        self.memory_lines = self.listener.memory.lines()
        self._assumed.update(self.listener.notes)
        self.notes = [f"{note} ({times}×)" for note, times in sorted(self._assumed.items())]
        where = "CUDA" if on_cuda() else "the CPU"
        self.notes.append(f"operators were counted as they ran on {where}")
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo and dynamo.counters["frames"]["total"]:
            self.notes.append("functions that torch.compile had made ran uncompiled")

    def rows(self, case: Subject) -> list[Measurement]:
        from dpbench.instruments.logical.counter import logical_rows

        if not any(operators for operators, _ in self._steps):
            raise NothingCounted(
                f"{case.id}: no operator of PyTorch ran in {self.observed} step(s)"
            )
        return [
            row
            for repeat, (operators, peaks) in enumerate(self._steps)
            for row in logical_rows(case, operators, peaks, peaks, repeat)
        ]

    def forked(self) -> None:
        self.close()


@contextmanager
def new_objects_collected() -> Iterator[None]:
    """Make the garbage collector skip old objects, PyTorch's above all: it takes half the time."""
    if gc.get_freeze_count():  # do not unfreeze others' objects
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
