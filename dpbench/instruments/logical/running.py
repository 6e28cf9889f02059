"""Counts what the operators of a running step move, on the real tensors as they pass."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.instruments.logical.counter import (
    NOT_WORK,
    ByteCounter,
    LiveMemory,
    is_composite,
    label,
)
from dpbench.instruments.logical.stand_ins import AssumedValues


class RunningCounter(ByteCounter):
    """A `ByteCounter` without fake tensors: operators run, on whichever device they are.

    What PyTorch chooses by device (attention, dropout) is as it is there, and tensors that were
    made before are not known to be alive, so peaks mean nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What a script compiles does not reach into the counting of its operators."""
        return True

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._values = AssumedValues()
        self.memory = LiveMemory()
        self._phase: str | None = None
        self._forget()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._phase is None or func.namespace in NOT_WORK:
            return func(*args, **kwargs)
        if is_composite(func):  # reaches a mode undecomposed in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        phase = self._phase
        out = func(*args, **kwargs)
        try:
            self._record(phase, func, args, kwargs, out)
        except (NotImplementedError, RuntimeError) as error:  # sparse tensors have no storage
            what = str(error).partition("\n")[0]
            self.notes[f"NOT COUNTED: {label(func)} ({what})"] += 1
        return out
