"""Counts the operators that scripts and functions run on tensors with data."""

from __future__ import annotations

import gc
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dpbench.child.recorder import Recorder, on_cuda
from dpbench.core.errors import InstrumentError
from dpbench.core.subject import Subject
from dpbench.results.kernels import STEP_LOST, OperatorCount
from dpbench.results.rows import Measurement

if TYPE_CHECKING:
    from dpbench.instruments.logical.counter import RealTensorCounter


class NothingCounted(InstrumentError):
    """No PyTorch operator ran. The steps may use another library or replay a CUDA graph."""

    remedy = (
        "run PyTorch operators in each step, or use the instrument cupti on a GPU for other "
        "libraries"
    )


class StepsLost(InstrumentError):
    """The script ended dpbench's dispatch mode in each step, or hid it."""

    remedy = (
        "train outside of inference mode, end dispatch modes in the step in which they begin, or "
        "use the instrument cupti on a GPU"
    )


class LogicalRecorder(Recorder):
    """Records logical bytes, FLOPs and live memory of each step."""

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        # The operators of each step, and the peak of live bytes by phase.
        self._steps: list[tuple[Sequence[OperatorCount], Mapping[str, int]]] = []
        self._calls = Counter[Any]()  # the calls of all steps
        self._lost: list[int] = []  # numbers of the steps that were not counted
        self._uncompiled = False  # whether a function that uses torch.compile ran
        self._assumed = Counter[str]()

    @cached_property
    def _counting(self) -> Any:
        """The module `counter`, which imports torch. A script may first set its environment."""
        from dpbench.instruments.logical import counter

        return counter

    @cached_property
    def counter(self) -> RealTensorCounter:
        counter: RealTensorCounter = self._counting.RealTensorCounter()
        self.held.callback(counter.remove)
        return counter

    @cached_property
    def listener(self) -> RealTensorCounter:
        counter = self.counter
        gc.collect()
        counter.track_memory()
        self.held.enter_context(freeze_existing_objects())
        self.held.enter_context(self._counting.track_resizing(counter.memory))
        return counter

    def compiler(self, eval_frame: Any) -> None:
        """Run compiled functions as they are, except what ``torch.cond`` and its like compile."""
        # With this stance, PyTorch does not complain of functions that must be compiled as a whole.
        stance = eval_frame.DynamoStance("force_eager")

        def callback(given: Any) -> Any:
            operators = sys.modules.get("torch._higher_order_ops.utils")
            if getattr(operators, "_in_hop_compile", bool)():
                return given
            if given not in (None, False) and not self._uncompiled:
                self._uncompiled = True
                # The end of the compiled function restores what PyTorch dispatches to now.
                self.counter.put_below()
            eval_frame._stance = stance  # the script may have set another one
            return None

        self.held.enter_context(patch.object(eval_frame, "_stance", stance))
        self.held.enter_context(patch.object(eval_frame, "_callback_from_stance", callback))

    def end_step(self) -> None:
        counter = self.listener
        counter.lost |= not counter.is_heard()
        super().end_step()
        if counter.lost:
            self._lost.append(self.observed)
        else:
            self._count(counter.operators, counter.peaks)
        self._assumed.update(self.listener.notes)
        self.notes = [f"{note} ({times}×)" for note, times in sorted(self._assumed.items())]
        where = "GPU" if on_cuda() else "CPU, and a GPU may run others"
        self.notes.append(f"counted: operators of the {where}")
        self.notes += [f"{STEP_LOST}: counted step {step}" for step in self._lost]
        if self._uncompiled:
            self.notes.append("functions that use torch.compile ran uncompiled")

    def _count(self, operators: Sequence[OperatorCount], peaks: Mapping[str, int]) -> None:
        """Add the counts of the last step, and keep its memory lines if it has the peak."""
        if all(max(peaks.values()) > max(others.values()) for _, others in self._steps):
            self.memory_lines = self.listener.memory.lines()
        self._steps.append((operators, peaks))
        self._calls.update(self.listener.calls)
        self.operators = self._counting.operator_counts(self._calls, len(self._steps))

    def rows(self, case: Subject) -> list[Measurement]:
        if len(self._lost) == self.observed:
            raise StepsLost(f"{case.id}: {STEP_LOST}: all {self.observed} steps")
        if not any(operators for operators, _ in self._steps):
            raise NothingCounted(f"{case.id}: no PyTorch operator ran in {self.observed} step(s)")
        return [
            row
            for repeat, (operators, peaks) in enumerate(self._steps)
            for row in self._counting.logical_rows(case, operators, peaks, repeat)
        ]

    def close(self) -> None:
        """Release resources, but not yet within a function that uses torch.compile.

        Its end makes PyTorch call dispatch modes again, so one must be left.
        """
        stack = traceback.walk_stack(sys._getframe())
        if not any(frame.f_code.co_name == "compile_wrapper" for frame, _ in stack):
            super().close()

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
