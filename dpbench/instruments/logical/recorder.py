"""Counts the operators that scripts and functions run on tensors with data."""

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
    """No PyTorch operator ran. The steps may use another library or replay a CUDA graph."""

    remedy = (
        "run PyTorch operators in each step, or use the instrument cupti on a GPU for other "
        "libraries"
    )


class LogicalRecorder(Recorder):
    """Records logical bytes, FLOPs and live memory of each step."""

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        # The operators of each step, and the peak of live bytes by phase.
        self._steps: list[tuple[Sequence[OperatorCount], Mapping[str, int]]] = []
        self._assumed = Counter[str]()

    @cached_property
    def listener(self) -> RealTensorCounter:
        import torch

        from dpbench.instruments.logical.counter import RealTensorCounter
        from dpbench.instruments.logical.memory import track_resizing

        counter = RealTensorCounter()
        gc.collect()
        self.held.enter_context(freeze_existing_objects())
        self.held.enter_context(track_resizing(counter.memory))
        self.held.enter_context(counter)
        # Dynamo cannot compile under a dispatch mode, and raises an error with `fullgraph`.
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
        self.notes.append(f"operators were counted while they ran on {where}")
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo and dynamo.counters["frames"]["total"]:
            self.notes.append("functions that use torch.compile ran uncompiled")

    def rows(self, case: Subject) -> list[Measurement]:
        from dpbench.instruments.logical.counter import logical_rows

        if not any(operators for operators, _ in self._steps):
            raise NothingCounted(f"{case.id}: no PyTorch operator ran in {self.observed} step(s)")
        return [
            row
            for repeat, (operators, peaks) in enumerate(self._steps)
            for row in logical_rows(case, operators, peaks, peaks, repeat)
        ]

    def forked(self) -> None:
        self.close()


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Make the garbage collector skip existing objects within the block.

    Most existing objects belong to PyTorch. Scanning these objects would slow the counting.
    """
    if gc.get_freeze_count():  # other code has frozen objects, which must stay frozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
