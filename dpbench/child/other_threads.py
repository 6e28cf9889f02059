"""Detects operators in other threads or in forks, which a count of the loop's thread misses."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from dpbench.child.step_finder import StepFinder
from dpbench.results.kernels import ELSEWHERE

LOADERS = "torch.utils.data."
"""Prefix of modules whose threads are ignored: a data loader's threads only move batches."""


def watch_elsewhere(finder: StepFinder) -> None:
    """Until the finder is closed, note operators of other threads and forks in counted steps."""
    # Shared with forks: whether a step is counted now, and whether a fork ran an operator in one.
    shared = mmap.mmap(-1, 2)
    keep, start = finder.keep, threading.Thread.start

    def keep_and_say() -> None:
        shared[0] = not finder.recorder.finished
        keep()

    def saw() -> None:
        if not shared.closed and (shared[0] or finder.counts):
            shared[1] = True

    def start_seen(thread: Any) -> None:
        target = getattr(thread, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith(LOADERS):
            thread.run = partial(_run_seen, thread.run, saw)
        start(thread)

    def end() -> None:
        finder.notes += [ELSEWHERE] if shared[1] else []
        shared.close()

    finder.keep = keep_and_say
    threading.Thread.start = start_seen  # type: ignore[method-assign, assignment]
    finder.undo.callback(end)
    finder.undo.callback(setattr, threading.Thread, "start", start)
    os.register_at_fork(after_in_child=partial(_enter_in_fork, shared, saw))


def _run_seen(run: Callable[[], object], saw: Callable[[], object]) -> None:
    with _seeing(saw) if "torch" in sys.modules else nullcontext():
        run()


def _enter_in_fork(shared: mmap.mmap, saw: Callable[[], object]) -> None:
    if "torch" in sys.modules and not shared.closed:
        _seeing(saw).__enter__()


def _seeing(saw: Callable[[], object]) -> AbstractContextManager[object]:
    """A mode that reports each operator of this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data import get_worker_info

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if get_worker_info() is None:  # not in a data loader's worker
                saw()
            return operator(*args, **(kwargs or {}))

    seeing: AbstractContextManager[object] = Seeing()  # type: ignore[no-untyped-call]
    return seeing
