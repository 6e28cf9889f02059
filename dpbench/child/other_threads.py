"""Detects operators of other threads and of forks, which a count of the loop's thread misses."""

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
"""Prefix of the modules of data loaders. Their threads are ignored, because they only move batches.
"""


def watch_threads_and_forks(finder: StepFinder) -> None:
    """Add a note to the finder if other threads or forks run operators during counted steps.

    The watching ends when the finder is closed.
    """
    # Two bytes shared with forks: whether steps are counted at the moment, and whether another
    # thread or a fork has run an operator meanwhile.
    shared = mmap.mmap(-1, 2)
    keep, start = finder.keep, threading.Thread.start

    def keep_and_share() -> None:
        shared[0] = not finder.recorder.finished
        keep()

    def saw() -> None:
        if not shared.closed and (shared[0] or finder.counts):
            shared[1] = True

    def start_watched(thread: Any) -> None:
        target = getattr(thread, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith(LOADERS):
            thread.run = partial(_run_watched, thread.run, saw)
        start(thread)

    def end() -> None:
        finder.notes += [ELSEWHERE] if shared[1] else []
        shared.close()

    finder.keep = keep_and_share
    threading.Thread.start = start_watched  # type: ignore[method-assign, assignment]
    finder.undo.callback(end)
    finder.undo.callback(setattr, threading.Thread, "start", start)
    os.register_at_fork(after_in_child=partial(_enter_in_fork, shared, saw))


def _run_watched(run: Callable[[], object], saw: Callable[[], object]) -> None:
    with _watching_mode(saw) if "torch" in sys.modules else nullcontext():
        run()


def _enter_in_fork(shared: mmap.mmap, saw: Callable[[], object]) -> None:
    if "torch" in sys.modules and not shared.closed:
        _watching_mode(saw).__enter__()


def _watching_mode(saw: Callable[[], object]) -> AbstractContextManager[object]:
    """Return a dispatch mode that calls ``saw`` for each operator of this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data import get_worker_info

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if get_worker_info() is None:  # a data loader's worker does not train
                saw()
            return operator(*args, **(kwargs or {}))

    mode: AbstractContextManager[object] = Watching()  # type: ignore[no-untyped-call]
    return mode
